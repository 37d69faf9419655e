"""Checkpointed blocks and excluded regions, on whatever platform runs them."""

from __future__ import annotations

from typing import Any, Callable, TypeVar, Union

from hyper_parallel.platform import get_platform

Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)`, drop its activations and recompute them in the backward pass.

    Outside of gradient computation (`no_grad`) this is a plain call.

    Args:
        fn: A Cell or a function: the checkpointed block.
        args: Its arguments: tensors, or any nest of tuple, list, dict, namedtuple and OrderedDict of them, and
            constants.
        kwargs: Its keyword arguments.

    Returns:
        What `fn` returns.

    Raises:
        ValueError: If `fn` cannot be called.
        ReplayMismatchError: In the backward pass, if the replay does not make the calls that the forward made.
    """
    return get_platform().checkpoint(fn, *args, **kwargs)


def checkpoint_wrapper(cell_or_fn: Wrapped) -> Wrapped:
    """Return `cell_or_fn` as a checkpointed block: every call of it goes through `checkpoint`.

    A wrapped Cell shares parameters, sub-cells, attributes and parameter names with the Cell that was given, which
    stays as it was; checkpoint files of one load into the other.

    Args:
        cell_or_fn: A Cell or a function.

    Raises:
        ValueError: If it is neither.
    """
    return get_platform().checkpoint_wrapper(cell_or_fn)


def checkpoint_exclude_wrapper(
    cell_or_fn: Wrapped, save_output: Union[bool, str] = True, keep_inputs: bool = False
) -> Wrapped:
    """Return `cell_or_fn` as an excluded region: inside a checkpointed block it runs once, a replay skips it.

    Outside of a checkpointed block the result behaves as `cell_or_fn` does. A wrapped Cell shares parameters,
    sub-cells, attributes and parameter names with the Cell that was given.

    Args:
        cell_or_fn: A Cell or a function.
        save_output: True keeps the output for the replay. False keeps nothing: right for a region whose output goes
            whole, as one argument, into another excluded region, and an error in any other use. "auto" starts with True
            and finds out in the first replay whether False is enough.
        keep_inputs: Whether the inputs that the region saves for its backward are kept alive as well (more memory),
            instead of taking them from the replay.

    Raises:
        ValueError: If an argument is not one of the above.
    """
    return get_platform().checkpoint_exclude_wrapper(cell_or_fn, save_output=save_output, keep_inputs=keep_inputs)
