"""Excluded regions: what a replay skips.

1. In a forward the region's body runs once. A call record keeps its output, the random state that it left behind and,
   weakly, a handle for each input: the replay will make the inputs again, so the region need not keep them.
2. Parameters, and outputs of excluded regions of the same invocation, are not deferred: they are alive anyway.
3. An input that cannot carry a mark (real_tensor.py) is known by its place in the graph; without one, it is replaced
   by a copy for the time of the call.
4. A replay takes the records in call order. It binds the handles that an operator still waits for, restores the random
   state, and returns the cached output. The body does not run.
5. A replay that finds the record released runs the body again, without recording it, and warns once.
6. An output that is not saved has a stand-in in the replay, which only another excluded region accepts, as a whole
   argument.
7. Outside of a checkpointed block, and inside another excluded region, the region is a plain call.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Parameter, Tensor, ops
from mindspore.common.generator import get_rng_state, set_rng_state
from mindspore.graph.api import _no_grad, _pynative_executor
from mindspore.nn import Cell

from hyper_parallel.platform.mindspore.activation_checkpoint.arguments import (
    arguments,
    check_output,
    describe,
    put_together,
    take_apart,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.call_record import (
    CallRecord,
    InputLeaf,
    OutputLeaf,
    UnsavedOutput,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.checkpoint_wrapper import name_of
from hyper_parallel.platform.mindspore.activation_checkpoint.input_handle import (
    InputHandle,
    Mark,
    Sources,
    deferring,
    mark_of,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.output_mark import (
    is_output_of,
    is_tensor,
    mark_output,
    mark_saved,
    mark_unsaved,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.real_tensor import MarkMemory
from hyper_parallel.platform.mindspore.activation_checkpoint.wrapped_cell import wrap_cell
from hyper_parallel.platform.mindspore.autograd import Function, node_of
from hyper_parallel.platform.mindspore.early_stop import stop_if_satisfied, stop_near_the_end
from hyper_parallel.platform.nest import TENSOR, flatten
from hyper_parallel.platform.recompute_state import (
    CallSite,
    Frame,
    Invocation,
    Phase,
    ReplayFrame,
    ReplayMismatchError,
    StartOver,
    current_frame,
)

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.graph.api._no_grad",
    "mindspore.graph.api._pynative_executor",
    "mindspore.Tensor._requires_grad",
    "mindspore.Tensor._version",
)

_EXCLUDED_FRAME = Frame(Phase.EXCLUDED, None)


class Region:
    """An excluded region: its name, what its calls keep, and what has been found out about it."""

    def __init__(self, name: str, save_output: bool | str, keep_inputs: bool) -> None:
        self.name = name
        self.save_output = save_output
        self.finds_out = save_output == "auto"
        self.keep_inputs = keep_inputs
        self.output_needed = False
        self.output_in_graph = False
        self.not_needed: weakref.WeakKeyDictionary[Any, set] = weakref.WeakKeyDictionary()
        self.memory = MarkMemory()
        self.warned = False

    def learn_not_needed(self, site: CallSite, position: int) -> None:
        """Note that no replay of the block called at `site` needs the output of its region call `position`."""
        self.not_needed.setdefault(site.owner, set()).add((site.kind, position))

    def saves_output(self, invocation: Invocation, position: int) -> bool:
        """Return whether the region call `position` of the invocation keeps its output: in any doubt, yes."""
        if not self.finds_out or self.output_needed or invocation.site is None:
            return self.save_output is not False
        return (invocation.site.kind, position) not in self.not_needed.get(invocation.site.owner, ())

    def call(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call the region, in whatever phase the current thread is."""
        frame = current_frame.get()
        if frame is None or frame.phase is Phase.EXCLUDED:
            return fn(*args, **kwargs)
        if frame.phase is Phase.FORWARD:
            return self._forward(frame, fn, args, kwargs)
        return self._replay(frame, fn, args, kwargs)

    def _forward(self, frame: Frame, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        leaves: list[Tensor] = []
        keys, nests = take_apart(args, kwargs, leaves)
        token = current_frame.set(_EXCLUDED_FRAME)
        marks: list[Mark] = []
        sources = Sources()
        try:
            inputs = self._defer(frame, leaves, marks, sources)
            record = CallRecord(self, len(frame.invocation.records), keys, nests, inputs)
            given = leaves
            if any(made.copied is not None for made in marks):
                given = [_worked_on(leaf) for leaf in leaves]
                args, kwargs = put_together(keys, nests, given)
            versions = _versions(given)
            with deferring(sources):
                result = fn(*args, **kwargs)
            if _versions(given) != versions:
                self._raise_changed(versions, _versions(given))
            self._record_output(frame, record, result, marks)
        finally:
            current_frame.reset(token)
            sources.end()
            for made in marks:
                made.end()
        record.random_state = get_rng_state()
        frame.invocation.records.append(record)
        return result

    def _defer(self, frame: Frame, leaves: list[Tensor], marks: list[Mark], sources: Sources) -> tuple[InputLeaf, ...]:
        """Mark the inputs that the replay will make again, and describe all of them for the replay."""
        if self.keep_inputs or not _pynative_executor.requires_grad():
            return tuple([InputLeaf(leaf.shape, leaf.dtype, None) for leaf in leaves])
        return tuple([self._defer_one(frame, leaf, place, marks, sources) for place, leaf in enumerate(leaves)])

    def _defer_one(self, frame: Frame, leaf: Tensor, position: int, marks: list[Mark], sources: Sources) -> InputLeaf:
        if isinstance(leaf, Parameter) or is_output_of(leaf, frame.invocation):
            return InputLeaf(leaf.shape, leaf.dtype, None)
        before = mark_of(leaf)
        if before is not None and before in marks:
            return InputLeaf(leaf.shape, leaf.dtype, None)
        handle = InputHandle(frame.handle, self.name, position)
        copy = None
        if not self.memory.keeps_mark(leaf, position):
            if node_of(leaf) is None:
                copy = ops.deepcopy(leaf)
            else:
                sources.add(leaf, handle)
        marks.append(Mark(leaf, before, handle, copy))
        return InputLeaf(leaf.shape, leaf.dtype, weakref.ref(handle))

    def _raise_changed(self, before: list[int], after: list[int]) -> None:
        position = next(at for at, (version, now) in enumerate(zip(before, after)) if version != now)
        raise RuntimeError(
            f"Excluded region '{self.name}' changed its input {position} (counting its tensors from 0) in place, but a "
            "replay skips the region and cannot make that change again; let the region work on a copy, or move the "
            "change out of it."
        )

    def _record_output(self, frame: Frame, record: CallRecord, result: Any, marks: list[Mark]) -> None:
        """Keep the result for the replay, and let regions that are called later know it again."""
        leaves: list[Tensor] = []
        record.output_nest = flatten(result, is_tensor, leaves)
        check_output(self.name, record.output_nest)
        record.saved = self.saves_output(frame.invocation, record.position)
        record.outputs = tuple([_output_leaf(record, leaf, marks) for leaf in leaves])
        for leaf, made in zip(leaves, record.outputs):
            if made.input_position is None or not record.saved:
                mark_output(leaf, frame.invocation)
            if self.save_output is False:
                mark_unsaved(leaf, frame.invocation, self.name)
            else:
                mark_saved(leaf)

    def _replay(self, frame: ReplayFrame, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        record = frame.take_record(self.name)
        leaves = self._check_arguments(frame, record, args, kwargs)
        if frame.handle is not None:
            for leaf, made in zip(leaves, record.inputs):
                handle = made.waiting()
                if handle is not None and leaf is not None:
                    frame.handle.bind(handle, leaf, frame.key)
        stop_if_satisfied(frame)
        if record.released or (record.output_needed and not record.saved):
            return self._run_again(frame, record, fn, args, kwargs, leaves)
        set_rng_state(record.random_state)
        if not record.saved or (self.finds_out and self._tries_without(frame, record)):
            return frame.hand_out(UnsavedOutput(record))
        outputs = self._outputs(frame, record, record.outputs, leaves)
        stop_near_the_end(frame)
        return outputs

    def _tries_without(self, frame: ReplayFrame, record: CallRecord) -> bool:
        """Return whether to find out if the replay can do without an output that is saved."""
        known = self.output_needed or record.output_needed
        return not known and frame.invocation.site is not None

    def _check_arguments(self, frame: ReplayFrame, record: CallRecord, args: tuple, kwargs: dict) -> list:
        """Return the tensors of the arguments, None for those that a stand-in covers, if they are as in the forward."""
        keys, values = arguments(args, kwargs)
        expected = record.nests
        if keys != record.keys or len(values) != len(expected):
            self._raise_mismatch(record, keys, values)
        leaves: list = []
        for value, nest in zip(values, expected):
            if nest is TENSOR and isinstance(value, Tensor):  # nearly always, so it takes no call
                leaves.append(value)
            elif type(value) is UnsavedOutput:
                self._take_stand_in(frame, record, value, len(leaves), nest.leaf_count())
                leaves.extend([None] * nest.leaf_count())
            elif flatten(value, is_tensor, leaves) != nest:
                self._raise_mismatch(record, keys, values)
        for position, (leaf, made) in enumerate(zip(leaves, record.inputs)):
            if leaf is not None and (leaf.shape != made.shape or leaf.dtype is not made.dtype):
                raise ReplayMismatchError(
                    f"The replay called excluded region '{self.name}' with tensor {position} of shape {leaf.shape} and "
                    f"dtype {leaf.dtype}, but the forward with shape {made.shape} and dtype {made.dtype}; make the "
                    "block call it in its replay as in its forward."
                )
        return leaves

    @staticmethod
    def _take_stand_in(frame: ReplayFrame, record: CallRecord, stand_in: UnsavedOutput, first: int, count: int) -> None:
        """Accept a stand-in for `count` tensors from `first` on, unless an operator waits for one of these."""
        frame.take_back(stand_in)
        waiting = [leaf.waiting() for leaf in record.inputs[first : first + count]]
        if frame.handle is not None and any(handle is not None for handle in waiting):
            raise stand_in.record.unsaved_output()

    def _raise_mismatch(self, record: CallRecord, keys: tuple, values: list) -> None:
        nests = [flatten(value, is_tensor, []) for value in values]
        for constant in itertools.chain.from_iterable(nest.constants() for nest in nests):
            if type(constant) is UnsavedOutput:
                raise constant.record.unsaved_output()
        raise ReplayMismatchError(
            f"The replay called excluded region '{self.name}' with arguments {describe(keys, nests)}, but the forward "
            f"with {describe(record.keys, record.nests)}; make the block call it in its replay as in its forward."
        )

    def _outputs(self, frame: ReplayFrame, record: CallRecord, made: Iterable[OutputLeaf], leaves: list) -> Any:
        """Return the result of the skipped region. It is in the graph only if the block sets elements of it."""
        if not self.output_in_graph:
            frame.plain_outputs.append(self)
        return record.output_nest.rebuild([_replayed(leaf, leaves, self.output_in_graph) for leaf in made])

    def _run_again(
        self, frame: ReplayFrame, record: CallRecord, fn: Callable[..., Any], args: tuple, kwargs: dict, leaves: list
    ) -> Any:
        """Run the body in a replay that comes after the record was released, or that needs an output nobody saved."""
        stand_ins = [value for value in arguments(args, kwargs)[1] if type(value) is UnsavedOutput]
        if stand_ins:
            for stand_in in stand_ins:
                stand_in.record.output_needed = True
            raise StartOver
        if record.released and not self.warned:
            self.warned = True
            warnings.warn(
                f"Excluded region '{self.name}' runs again: a second replay of its block came after its cached output "
                "had been released. Share one recompute session between the backward passes to run it once.",
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
        return self._outputs(frame, record, outputs, leaves)


def _worked_on(leaf: Tensor) -> Tensor:
    """Return the copy that a region works on instead of its input, or the input itself."""
    mark = mark_of(leaf)
    return leaf if mark is None or mark.copied is None else mark.copied


def _versions(tensors: list[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place. A Parameter is a state that a region may well move on."""
    return [0 if isinstance(tensor, Parameter) else tensor._version for tensor in tensors]


def _output_leaf(record: CallRecord, leaf: Tensor, marks: list[Mark]) -> OutputLeaf:
    mark = mark_of(leaf)
    if mark is not None and mark in marks:
        return OutputLeaf(None, mark.position, False)
    return OutputLeaf(leaf.data if record.saved else None, None, leaf._requires_grad)


class _InGraph(Function):
    """Gives a leaf a place in the graph. Never differentiated."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _replayed(made: OutputLeaf, inputs: list, in_graph: bool) -> Tensor:
    """Return one output of a skipped region; operators save for it what they saved in the forward."""
    if made.input_position is not None:
        return inputs[made.input_position]
    output = made.tensor.data
    if made.requires_grad:
        output.requires_grad_()
        if in_graph:
            return _InGraph.apply(output)
    return output


def checkpoint_exclude_wrapper(cell_or_fn: Any, save_output: bool | str = True, keep_inputs: bool = False) -> Any:
    """Return `cell_or_fn` as an excluded region. See the public function of this name."""
    if not isinstance(save_output, bool) and save_output != "auto":
        raise ValueError(
            f"checkpoint_exclude_wrapper: argument 'save_output' must be True, False or \"auto\", but is "
            f"{save_output!r} of type {type(save_output).__name__}."
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
