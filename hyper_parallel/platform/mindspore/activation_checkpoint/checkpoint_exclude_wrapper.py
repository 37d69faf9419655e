"""Excluded regions: what a replay skips.

1. In a forward the region's body runs once. A call record keeps its output, the random state it left behind and, weakly, a handle
   for each input: the replay will make the inputs again, so the region need not keep them.
2. Parameters, and outputs of excluded regions of the same invocation (which the records keep anyway), are not deferred.
3. A replay takes the records in call order. It binds the handles that an operator still waits for, restores the random
   state, and returns the cached output. The body does not run.
4. A replay that finds the record released runs the body again, without recording it, and warns once.
5. With `save_output=False` the replay returns a stand-in, which only another excluded region accepts, as a whole argument.
6. Outside of a checkpointed block, and inside another excluded region, the region is a plain call.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Parameter, Tensor
from mindspore.common._grad_function import _Function
from mindspore.common.generator import get_rng_state, set_rng_state
from mindspore.graph.api import _no_grad
from mindspore.nn import Cell

from hyper_parallel.platform.mindspore.activation_checkpoint.call_record import CallRecord, InputLeaf, OutputLeaf
from hyper_parallel.platform.mindspore.activation_checkpoint.checkpoint_wrapper import is_tensor, name_of
from hyper_parallel.platform.mindspore.activation_checkpoint.input_handle import (
    InputHandle,
    Mark,
    deferring,
    mark,
    marked_with,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.wrapped_cell import wrap_cell
from hyper_parallel.platform.nest import Nest, flatten
from hyper_parallel.platform.recompute_state import (
    Frame,
    Phase,
    ReplayFrame,
    ReplayMismatchError,
    current_frame,
)

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.common._grad_function._Function",
    "mindspore.graph.api._no_grad",
    "mindspore.Tensor._get_user_data",
    "mindspore.Tensor._set_user_data",
    "mindspore.Tensor._requires_grad",
    "mindspore.Tensor._version",
)

_EXCLUDED_FRAME = Frame(Phase.EXCLUDED, None)
_OUTPUT_MARK = "hyper_parallel_excluded_output"


class _CachedOutput(_Function):
    """Gives a cached output, in a replay, the place in the graph that it had in the forward. It is never differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return None, grad


class Region:
    """An excluded region: the function, its name, and what its calls keep."""

    def __init__(self, name: str, save_output: bool, keep_inputs: bool) -> None:
        self.name = name
        self.save_output = save_output
        self.keep_inputs = keep_inputs
        self.warned = False

    def call(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call the region in whatever phase the current thread is."""
        frame = current_frame.get()
        if frame is None or frame.phase is Phase.EXCLUDED:
            return fn(*args, **kwargs)
        if frame.phase is Phase.FORWARD:
            return self._forward(frame, fn, args, kwargs)
        return self._replay(frame, fn, args, kwargs)

    def _forward(self, frame: Frame, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        leaves: list[Tensor] = []
        keys, nests = _take_apart(args, kwargs, leaves)
        marks: list[Mark] = []
        inputs = tuple([self._defer(frame, leaf, position, marks) for position, leaf in enumerate(leaves)])
        record = CallRecord(self.name, keys, nests, inputs)
        token = current_frame.set(_EXCLUDED_FRAME)
        try:
            with deferring():
                result = fn(*args, **kwargs)
            self._check_versions(marks)
            self._record_output(record, frame.invocation.serial, result)
        finally:
            current_frame.reset(token)
            for tensor, before, _, _ in marks:
                mark(tensor, before)
        record.random_state = get_rng_state()
        frame.invocation.records.append(record)
        return result

    def _defer(self, frame: Frame, leaf: Tensor, position: int, marks: list[Mark]) -> InputLeaf:
        """Mark one input with a handle, unless it is to be kept, and describe it for the replay."""
        kept = (
            self.keep_inputs
            or isinstance(leaf, Parameter)
            or leaf._get_user_data(_OUTPUT_MARK) == frame.invocation.serial
        )
        before = None if kept else marked_with(leaf)
        if kept or (before is not None and any(before is made.handle for made in marks)):
            return InputLeaf(leaf.shape, leaf.dtype, None)
        handle = InputHandle(frame.handle, self.name, position)
        marks.append(Mark(leaf, before, leaf._version, handle))
        mark(leaf, handle)
        return InputLeaf(leaf.shape, leaf.dtype, weakref.ref(handle))

    def _check_versions(self, marks: list[Mark]) -> None:
        for tensor, _, version, handle in marks:
            if tensor._version != version:
                raise RuntimeError(
                    f"Excluded region '{self.name}' changed its input {handle.position} (of its tensors, in order) in place; a "
                    "replay skips the region and cannot make that change again. Let the region work on a copy, or move the "
                    "change out of it."
                )

    def _record_output(self, record: CallRecord, serial: int, result: Any) -> None:
        """Keep the result for the replay, and let regions called later know that it is kept."""
        leaves: list[Tensor] = []
        record.output_nest = flatten(result, is_tensor, leaves)
        record.outputs = tuple([self._output_leaf(record, leaf) for leaf in leaves])
        for leaf in leaves:
            leaf._set_user_data(_OUTPUT_MARK, serial)

    def _output_leaf(self, record: CallRecord, leaf: Tensor) -> OutputLeaf:
        handle = marked_with(leaf)
        if handle is not None:
            for position, made in enumerate(record.inputs):
                if made.handle is not None and made.handle() is handle:
                    return OutputLeaf(None, position, False)
        return OutputLeaf(leaf.data if self.save_output else None, None, leaf._requires_grad)

    def _replay(self, frame: ReplayFrame, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        record = frame.take_record(self.name)
        leaves: list[Tensor] = []
        keys, nests = _take_apart(args, kwargs, leaves)
        self._check_inputs(record, keys, nests, leaves)
        if frame.bind is not None:
            for leaf, made in zip(leaves, record.inputs):
                handle = made.handle() if made.handle is not None else None
                if handle is not None:
                    frame.bind(handle, leaf)
        if record.released:
            return self._run_again(record, fn, args, kwargs, leaves)
        set_rng_state(record.random_state)
        return record.output_nest.rebuild([_replayed(made, leaves) for made in record.outputs])

    def _check_inputs(self, record: CallRecord, keys: tuple, nests: tuple[Nest, ...], leaves: list[Tensor]) -> None:
        if keys != record.keys or nests != record.nests:
            raise ReplayMismatchError(
                f"The replay called excluded region '{self.name}' with arguments {_describe(keys, nests)}, but the forward "
                f"with {_describe(record.keys, record.nests)}; make the block call it in its replay as in its forward."
            )
        for position, (leaf, made) in enumerate(zip(leaves, record.inputs)):
            if leaf.shape != made.shape or leaf.dtype != made.dtype:
                raise ReplayMismatchError(
                    f"The replay called excluded region '{self.name}' with tensor {position} of shape {leaf.shape} and dtype "
                    f"{leaf.dtype}, but the forward with shape {made.shape} and dtype {made.dtype}; make the block call it in "
                    "its replay as in its forward."
                )

    def _run_again(self, record: CallRecord, fn: Callable[..., Any], args: tuple, kwargs: dict, leaves: list) -> Any:
        """Run the body in a replay that comes after the record was released."""
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"Excluded region '{self.name}' runs again: a second replay of its block came after its cached output had "
                "been released. Share one recompute session between the backward passes to run it once.",
                stacklevel=4,
            )
        token = current_frame.set(_EXCLUDED_FRAME)
        try:
            with _no_grad():
                result = fn(*args, **kwargs)
        finally:
            current_frame.reset(token)
        made: list[Tensor] = []
        flatten(result, is_tensor, made)
        outputs = [leaf._replace(tensor=tensor) for leaf, tensor in zip(record.outputs, made)]
        return record.output_nest.rebuild([_replayed(leaf, leaves) for leaf in outputs])


def _take_apart(args: tuple, kwargs: dict, leaves: list[Tensor]) -> tuple[tuple, tuple[Nest, ...]]:
    """Append the tensors of all arguments to `leaves`; return the keyword names and each argument's nest."""
    nests = [flatten(arg, is_tensor, leaves) for arg in args]
    if kwargs:
        nests.extend([flatten(kwargs[key], is_tensor, leaves) for key in sorted(kwargs)])
    return tuple(sorted(kwargs)), tuple(nests)


def _describe(keys: tuple, nests: tuple[Nest, ...]) -> str:
    names = [""] * (len(nests) - len(keys)) + [f"{key}=" for key in keys]
    return "(" + ", ".join(f"{name}{nest!r}" for name, nest in zip(names, nests)) + ")"


def _replayed(made: OutputLeaf, inputs: list[Tensor]) -> Tensor:
    """Return one output of a skipped region, in the graph of the replay if it was in the graph of the forward."""
    if made.input_position is not None:
        return inputs[made.input_position]
    return _CachedOutput.apply(_anchor(), made.tensor) if made.requires_grad else made.tensor.data


@functools.lru_cache(maxsize=None)
def _anchor() -> Tensor:
    """A tensor that requires a gradient, made when the first one is needed."""
    anchor = Tensor([0.0], mindspore.float32)
    anchor.requires_grad_()
    return anchor


def checkpoint_exclude_wrapper(cell_or_fn: Any, save_output: bool | str = True, keep_inputs: bool = False) -> Any:
    """Return `cell_or_fn` as an excluded region. See the public function of this name."""
    if save_output not in (True, False):
        raise ValueError(
            f"checkpoint_exclude_wrapper: argument 'save_output' must be True or False, but is {save_output!r} of type "
            f"{type(save_output).__name__}."
        )
    if not isinstance(keep_inputs, bool):
        raise ValueError(
            f"checkpoint_exclude_wrapper: argument 'keep_inputs' must be True or False, but is {keep_inputs!r} of type "
            f"{type(keep_inputs).__name__}."
        )
    if not callable(cell_or_fn):
        raise ValueError(
            "checkpoint_exclude_wrapper: argument 'cell_or_fn' must be a Cell or a function, but is of type "
            f"{type(cell_or_fn).__name__}; pass what is to be called, not its result."
        )
    region = Region(name_of(cell_or_fn), save_output, keep_inputs)
    if isinstance(cell_or_fn, Cell):
        return wrap_cell(cell_or_fn, region.call)

    @functools.wraps(cell_or_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return region.call(cell_or_fn, args, kwargs)

    return wrapped
