"""Checkpointed blocks.

1. A call of a block is an invocation. It hands MindSpore's recompute a flat list of tensors, so tensors inside
   containers and keyword arguments are dropped and recomputed like any other.
2. In the replay of an outer block, a call of an inner one is a forward for MindSpore, but a replay for its excluded
   regions: they have run. It reads the records of the invocation that the forward made, and binds nothing: that is the
   inner replay's work.
3. Where no gradient is wanted, or no tensor is given, a block is a plain call.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from mindspore import Tensor
from mindspore.nn import Cell

from hyper_parallel.platform.mindspore.activation_checkpoint.call_record import UnsavedOutput
from hyper_parallel.platform.mindspore.activation_checkpoint.input_handle import mark_of
from hyper_parallel.platform.mindspore.activation_checkpoint.output_mark import check_result_is_saved, is_tensor
from hyper_parallel.platform.mindspore.activation_checkpoint.wrapped_cell import wrap_cell
from hyper_parallel.platform.mindspore.early_stop import Endings, stop_near_the_end
from hyper_parallel.platform.mindspore.recompute import BlockHandle, run_block
from hyper_parallel.platform.nest import Nest, flatten
from hyper_parallel.platform.recompute_state import CallSite, Frame, Invocation, Phase, ReplayFrame, current_frame

PRIVATE_INTERFACES: tuple[str, ...] = ("mindspore.Tensor._requires_grad",)


def name_of(fn: Any) -> str:
    """Return what error messages call a Cell or function."""
    return getattr(fn, "__qualname__", None) or type(fn).__name__


class Block:
    """One call of a checkpointed block: what MindSpore calls in the forward and in each replay."""

    def __init__(self, fn: Callable[..., Any], name: str, endings: Endings, nest: Nest, tensors: list[Tensor]) -> None:
        self.fn = fn
        self.name = name
        self.endings = endings
        self.nest = nest
        self.needs_grad = tuple([tensor._requires_grad for tensor in tensors])
        # A block inside an excluded region gets what that region defers.
        marks = [mark for mark in map(mark_of, tensors) if mark is not None and mark.handle is not None]
        self.makers = tuple({id(mark.handle.block): mark.handle.block for mark in marks}.values())
        self.forward_frame: Frame | None = None

    def started(self, handle: Any) -> None:
        """Prepare for the forward, which comes next; MindSpore made `handle` for it."""
        outer = current_frame.get()
        if outer is not None and outer.phase is Phase.REPLAY:
            invocation = outer.take_child(self.name)
            self.forward_frame = ReplayFrame(invocation, outer=outer)
        else:
            nested = outer is not None and outer.phase is Phase.FORWARD
            invocation = Invocation(self.name, None if nested else _call_site(self.fn, self.needs_grad))
            self.forward_frame = Frame(Phase.FORWARD, invocation, handle)
            if nested:
                outer.invocation.children.append(invocation)
        BlockHandle.adopt(handle, invocation, self.makers, self.endings)

    def __call__(self, *tensors: Tensor) -> Any:
        args, kwargs = self.nest.rebuild(tensors)
        frame, self.forward_frame = self.forward_frame, None
        if frame is None:
            return self._again(args, kwargs)
        token = current_frame.set(frame)
        try:
            result = self.fn(*args, **kwargs)
        finally:
            current_frame.reset(token)
        if frame.phase is Phase.FORWARD:
            # In the replay of an outer block the same tensors come out, and the forward has been checked.
            check_result_is_saved(frame.invocation, result)
        return result

    def _again(self, args: tuple, kwargs: dict) -> Any:
        """Run in a replay, where MindSpore has opened a graph, or where no gradient is wanted."""
        frame = current_frame.get()
        if frame is not None and frame.phase is Phase.REPLAY:
            frame.started = True
            stop_near_the_end(frame)
        return self.fn(*args, **kwargs)


def _call_site(fn: Callable[..., Any], needs_grad: tuple[bool, ...]) -> CallSite | None:
    """Return where a block is called; None for a block that the next step cannot be known to call again."""
    owner, method = (fn.__self__, fn.__func__) if isinstance(fn, types.MethodType) else (fn, None)
    try:
        weakref.ref(owner)
        hash(owner)
    except TypeError:
        return None
    return CallSite(owner, (method, needs_grad))


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn`, drop its activations and recompute them in the backward pass. See the public function of this name."""
    if not callable(fn):
        raise ValueError(
            f"checkpoint: argument 'fn' must be a Cell or a function, but is of type {type(fn).__name__}; pass what is "
            "to be called, not its result."
        )
    return call_block(fn, name_of(fn), Endings(), args, kwargs)


def call_block(fn: Callable[..., Any], name: str, endings: Endings, args: tuple, kwargs: dict) -> Any:
    """Call `fn(*args, **kwargs)` as a checkpointed block that error messages call `name`."""
    tensors: list[Tensor] = []
    nest = flatten((args, kwargs), is_tensor, tensors)
    _refuse_stand_ins(nest)
    block = Block(fn, name, endings, nest, tensors)
    return run_block(block, block.started, tensors)


def _refuse_stand_ins(nest: Nest) -> None:
    """Raise if an output that is not saved goes into a block: its replay would get other tensors than its forward."""
    frame = current_frame.get()
    if frame is not None and frame.phase is Phase.REPLAY and frame.stand_ins:
        for constant in nest.constants():
            if type(constant) is UnsavedOutput:
                raise constant.record.unsaved_output()


def checkpoint_wrapper(cell_or_fn: Any) -> Any:
    """Return `cell_or_fn` with every call going through `checkpoint`. See the public function of this name."""
    name, endings = name_of(cell_or_fn), Endings()
    if isinstance(cell_or_fn, Cell):
        return wrap_cell(cell_or_fn, lambda call, args, kwargs: call_block(call, name, endings, args, kwargs))
    if not callable(cell_or_fn):
        raise ValueError(
            f"checkpoint_wrapper: argument 'cell_or_fn' must be a Cell or a function, but is of type "
            f"{type(cell_or_fn).__name__}."
        )

    @functools.wraps(cell_or_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call_block(cell_or_fn, name, endings, args, kwargs)

    return wrapped
