"""One micro-batch through one stage: forward, recompute, backward or dx and dw, release.

1. A chunk owns one recompute session. Every step enters it on the thread that the step runs on, so each checkpointed
   block is replayed once, by whichever step needs it first.
2. The session retains during recompute. dx retains what dw reads (split_backward, rule 4), whoever replayed the block.
   Else each tensor is dropped as it is read.
3. After dx only what dw reads is alive (split_backward, rule 5): a recomputed tensor lives as long as the operator that
   saved its placeholder.
4. A step out of order raises ChunkError and changes nothing. A step that fails releases the chunk, restores the random
   state, and raises the original error with stage, micro-batch and step in front.
5. Steps exclude each other, those of different chunks too, as MindSpore's executor is one per process. A dx asked for
   on one thread waits for the recompute that runs on another.
6. Inputs are detached and outputs are returned detached, so no graph crosses from chunk to chunk or outlives its chunk.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Parameter, Tensor, get_rng_state, set_rng_state

from hyper_parallel.platform.mindspore.autograd import add_gradient, detached, one_thread, recording, requires_grad
from hyper_parallel.platform.mindspore.retention import SavedTensors, storage_bytes
from pipeline.execution.nest import leaves, map_leaves
from pipeline.execution.retention import RecomputeSession, Retention
from pipeline.execution.split_backward import Gradients, SplitBackward

InputGrads = Gradients


class ChunkError(RuntimeError):
    """A step was asked for that the chunk's state does not allow."""


class ChunkState(str, enum.Enum):
    """Where a chunk is. The value is what messages call it."""

    NEW = "new"
    FORWARDED = "forwarded"
    RECOMPUTED = "recomputed"
    INPUT_DONE = "dx done"
    RELEASED = "released"


_ALLOWED = {
    "forward": (ChunkState.NEW,),
    "recompute": (ChunkState.FORWARDED, ChunkState.RECOMPUTED),
    "backward": (ChunkState.FORWARDED, ChunkState.RECOMPUTED),
    "backward_input": (ChunkState.FORWARDED, ChunkState.RECOMPUTED),
    "backward_weight": (ChunkState.INPUT_DONE,),
}
_ADVICE = {
    ChunkState.NEW: "call forward first",
    ChunkState.FORWARDED: "it waits for recompute, backward or backward_input",
    ChunkState.RECOMPUTED: "it waits for backward or backward_input",
    ChunkState.INPUT_DONE: "it waits for backward_weight",
    ChunkState.RELEASED: "make a new chunk",
}


class Chunk:
    """One micro-batch through one stage.

    Args:
        stage: index of the stage; names the chunk in errors.
        micro_batch: index of the micro-batch; names the chunk in errors.
        weights: the parameters that get gradients; those that need none are passed over, one given twice counts once.
        retention: one object for all chunks of a stage. With it `held_bytes` knows what operators outside of
            checkpointed blocks save; without it they are not counted.
    """

    def __init__(
        self, stage: int, micro_batch: int, weights: Sequence[Parameter], retention: Retention | None = None
    ) -> None:
        self.stage = stage
        self.micro_batch = micro_batch
        self._weights = tuple({id(weight): weight for weight in weights}.values())
        self._state = ChunkState.NEW
        self._session = RecomputeSession(stage, micro_batch)
        self._split: SplitBackward | None = None
        self._leaves: list[Tensor | None] = []
        self._retention = retention
        self._shapes: Any = None
        self._saved: SavedTensors | None = None

    @property
    def state(self) -> ChunkState:
        """Where the chunk is."""
        return self._state

    def forward(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` and record it.

        Tensors in the arguments that need a gradient get one in dx; they are detached from whatever made them.
        Parameters in the arguments stay what they are.

        Returns:
            What `fn` returned, its tensors detached. Those that a gradient is wanted for are marked as requiring one,
            so that whoever takes them over, here or on another rank, asks for it.
        """
        with one_thread, _Step(self, "forward", ChunkState.FORWARDED), self._session.collecting(), recording():
            self._look_at(args, kwargs)
            args, kwargs = map_leaves(self._own_input, (args, kwargs))
            with self._saved.counting() if self._saved is not None else contextlib.nullcontext():
                outputs = fn(*args, **kwargs)
            self._split = SplitBackward(outputs, [leaf for leaf in self._leaves if leaf is not None], self._weights)
            return map_leaves(_handed_on, outputs)

    def recompute(self, last: int | None = None) -> None:
        """Replay the checkpointed blocks now: all, or only the `last` ones (those that the backward reaches first).

        Blocks that have been replayed are passed over. A block inside another block counts as one of its own.
        """
        with one_thread, _Step(self, "recompute", ChunkState.RECOMPUTED), self._session.reading(retain=True):
            self._session.replay(last)
            self._split.explore()

    def backward(self, output_grads: Any = None) -> InputGrads:
        """The whole backward: adds the weights' gradients up, returns the inputs', releases the chunk.

        Args:
            output_grads: nest like the outputs, None for an output without gradient; None for a scalar loss means ones.

        Returns:
            One gradient for each tensor in the arguments of `forward`, None where none is needed.

        Errors:
            ValueError: `output_grads` does not fit the outputs.
        """
        with one_thread, _Step(self, "backward", ChunkState.RELEASED):
            with self._session.reading(retain=False):
                input_grads, weight_grads = self._split.full(output_grads)
            self._add_up(weight_grads)
            aligned = self._aligned(input_grads)
            self._free()
            return aligned

    def backward_input(self, output_grads: Any = None) -> InputGrads:
        """dx: the gradients of the inputs only, as in `backward`. What dw needs is kept for `backward_weight`."""
        with one_thread, _Step(self, "backward_input", ChunkState.INPUT_DONE):
            with self._session.reading(retain=False):
                input_grads = self._split.inputs(output_grads)
            aligned = self._aligned(input_grads)
            self._leaves = []
            return aligned

    def backward_weight(self) -> None:
        """dw: adds the weights' gradients up and releases the chunk."""
        with one_thread, _Step(self, "backward_weight", ChunkState.RELEASED):
            with self._session.reading(retain=False):
                weight_grads = self._split.weights()
            self._add_up(weight_grads)
            self._free()

    def release(self) -> None:
        """Let go of everything, in whatever state the chunk is. May be called again."""
        with one_thread:
            self._state = ChunkState.RELEASED
            self._free()

    def held_bytes(self) -> int:
        """Bytes of the tensors that the chunk keeps alive in its present state; weights and outputs are not its own."""
        with one_thread:
            known = self._known_tensors()
            if self._saved is not None:
                return storage_bytes([*known, *self._saved], without=self._weights)
            seen = 0
            if self._retention is not None and self._split is not None:
                seen = self._retention.saved_bytes(self._shapes, self._state)
            return storage_bytes(known, without=self._weights) + seen

    def _known_tensors(self) -> list[Tensor]:
        kept = [leaf for leaf in self._leaves if leaf is not None]
        return [*kept, *self._session.tensors(), *(self._split.tensors() if self._split is not None else ())]

    def _look_at(self, args: Any, kwargs: Any) -> None:
        """Count what operators save in this chunk if no chunk with inputs of these shapes has been looked at."""
        if self._retention is not None:
            tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
            self._saved = None if self._retention.knows(self._shapes) else SavedTensors()

    def _learn(self) -> None:
        if self._saved is not None:
            known = [*self._known_tensors(), *self._weights]
            self._retention.learn(self._shapes, self._state, storage_bytes(self._saved, without=known))

    def _own_input(self, leaf: Any) -> Any:
        """An input that needs a gradient becomes a leaf of the chunk's own graph."""
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, Parameter) or not requires_grad(leaf):
            self._leaves.append(None)
            return leaf
        self._leaves.append(detached(leaf, needs_grad=True))
        return self._leaves[-1]

    def _aligned(self, grads: Gradients) -> InputGrads:
        found = iter(grads)
        return tuple(None if leaf is None else next(found) for leaf in self._leaves)

    def _add_up(self, grads: Gradients) -> None:
        for weight, grad in zip(self._weights, grads):
            if grad is not None:
                add_gradient(weight, grad)

    def _free(self) -> None:
        if self._split is not None:
            self._split.release()
        self._split, self._leaves, self._saved = None, [], None
        self._session.clear()

    def _check(self, step: str) -> None:
        """Refuse a step that the state does not allow."""
        if self._state not in _ALLOWED[step]:
            allowed = " or ".join(f"'{state.value}'" for state in _ALLOWED[step])
            raise ChunkError(
                f"{self._name(step)}: needs a chunk that is {allowed}, but it is '{self._state.value}'; "
                f"{_ADVICE[self._state]}."
            )

    def _become(self, state: ChunkState) -> None:
        """The state after a step that worked."""
        self._state = state
        self._learn()

    def _name(self, step: str) -> str:
        """What errors call a step of this chunk."""
        return f"stage {self.stage}, micro-batch {self.micro_batch}, {step}"


class _Step:
    """A step of a chunk (rule 4). No generator: that costs several times as much.

    It is entered inside `one_thread`, and does not take that itself: an interrupt on the way would leave it taken.
    """

    __slots__ = ("_after", "_chunk", "_random_state", "_step")

    def __init__(self, chunk: Chunk, step: str, after: ChunkState) -> None:
        self._chunk = chunk
        self._step = step
        self._after = after

    def __enter__(self) -> None:
        self._chunk._check(self._step)
        self._random_state = get_rng_state()

    def __exit__(self, kind: type | None, error: BaseException | None, _: Any) -> None:
        if error is None:
            self._chunk._become(self._after)
        else:
            self._chunk.release()
            set_rng_state(self._random_state)
            _put_in_front(error, self._chunk._name(self._step))


def _put_in_front(error: BaseException, name: str) -> None:
    """Name the step in the error itself, so that its type and traceback stay what they are.

    An argument that is no text is left alone, as somebody may read it; Python 3.11 has a note for that.
    """
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{name}: {error.args[0]}", *error.args[1:])
    elif not error.args:
        error.args = (name,)
    elif hasattr(error, "add_note"):
        error.add_note(name)


def _handed_on(leaf: Any) -> Any:
    return detached(leaf, requires_grad(leaf)) if isinstance(leaf, Tensor) else leaf
