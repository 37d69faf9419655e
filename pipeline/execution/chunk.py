"""One micro-batch through one stage: forward, recompute, backward or dx and dw, release.

1. A chunk owns one recompute session. Every step enters it on the thread that the step runs on, so each checkpointed
   block is replayed once, by whichever step needs it first.
2. The session retains during recompute and dx, because dw still reads; in backward and dw each tensor is read last.
3. After dx only what dw reads is alive (split_backward, rule 4): a recomputed tensor lives as long as the operator that
   saved its placeholder.
4. A step out of order raises ChunkError and changes nothing. A step that fails releases the chunk, restores the random
   state, and raises the original error with stage, micro-batch and step in front.
5. Steps of one chunk exclude each other: a dx asked for on one thread waits for the recompute that runs on another.
6. Inputs are detached and outputs are returned detached, so no graph crosses from chunk to chunk or outlives its chunk.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import Parameter, Tensor

from hyper_parallel.platform.mindspore.autograd import add_gradient, detached, recording, requires_grad
from hyper_parallel.platform.mindspore.retention import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)
from pipeline.execution.nest import map_leaves
from pipeline.execution.split_backward import Gradients, SplitBackward

InputGrads = Gradients
_numbers = itertools.count()


class ChunkError(RuntimeError):
    """A step was asked for that the chunk's state does not allow."""


class ChunkState(str, enum.Enum):
    """Where a chunk is; the value is how messages call it."""

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


class Chunk:
    """One micro-batch through one stage.

    Args:
        stage: index of the stage; names the chunk in errors.
        micro_batch: index of the micro-batch; names the chunk in errors.
        weights: the parameters that get gradients; those that need none are passed over.
    """

    def __init__(self, stage: int, micro_batch: int, weights: Sequence[Parameter], retention: Any = None) -> None:
        self.stage = stage
        self.micro_batch = micro_batch
        self._weights = tuple(weights)
        self._state = ChunkState.NEW
        self._session = (stage, micro_batch, next(_numbers))
        self._handles: list[Any] = []
        self._leaves: list[Tensor | None] = []
        self._split: SplitBackward | None = None
        self._lock = threading.RLock()

    @property
    def state(self) -> ChunkState:
        """Where the chunk is."""
        return self._state

    def forward(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)` and record it.

        Tensors in the arguments that need a gradient get one in dx; they are detached from whatever made them.

        Returns:
            What `fn` returned, its tensors detached.
        """
        with self._step("forward", ChunkState.FORWARDED), recompute_handle_collector_ctx() as handles, recording():
            self._handles = handles
            args, kwargs = map_leaves(self._detach_input, (args, kwargs))
            outputs = fn(*args, **kwargs)
            self._split = SplitBackward(outputs, [leaf for leaf in self._leaves if leaf is not None], self._weights)
            return map_leaves(
                lambda leaf: detached(leaf, requires_grad(leaf)) if isinstance(leaf, Tensor) else leaf, outputs
            )

    def recompute(self, last: int | None = None) -> None:
        """Replay the checkpointed blocks now: all, or only the `last` ones (those that the backward reaches first)."""
        with self._step("recompute", ChunkState.RECOMPUTED), self._reading(retain=True):
            for handle in self._handles if last is None else self._handles[max(0, len(self._handles) - last) :]:
                recompute_handle(handle, self._session)

    def backward(self, output_grads: Any = None) -> InputGrads:
        """The whole backward: adds the weights' gradients up, returns the inputs'.

        Args:
            output_grads: nest like the outputs, None for an output without gradient; None for a scalar loss means ones.

        Returns:
            One gradient for each tensor in the arguments of `forward`, None where none is needed.
        """
        with self._step("backward", ChunkState.RELEASED), self._reading(retain=False):
            input_grads, weight_grads = self._split.full(output_grads)
            self._add_up(weight_grads)
            aligned = self._aligned(input_grads)
            self._free()
            return aligned

    def backward_input(self, output_grads: Any = None) -> InputGrads:
        """dx: the gradients of the inputs only, as in `backward`. What dw needs is kept for `backward_weight`."""
        with self._step("backward_input", ChunkState.INPUT_DONE), self._reading(retain=True):
            aligned = self._aligned(self._split.inputs(output_grads))
            self._leaves = []
            return aligned

    def backward_weight(self) -> None:
        """dw: adds the weights' gradients up and releases the chunk."""
        with self._step("backward_weight", ChunkState.RELEASED), self._reading(retain=False):
            self._add_up(self._split.weights())
            self._free()

    def release(self) -> None:
        """Let go of everything, in whatever state the chunk is. May be called again."""
        with self._lock:
            self._state = ChunkState.RELEASED
            self._free()

    def held_bytes(self) -> int:
        """Bytes of the tensors that the chunk keeps alive."""
        return 0

    def _reading(self, retain: bool) -> contextlib.AbstractContextManager:
        """The chunk's session on this thread; `retain`: a later step reads the recomputed tensors again."""
        return recompute_session_ctx(self._session, retain_on_unpack=retain)

    def _detach_input(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        needs_grad = requires_grad(leaf)
        own = detached(leaf, needs_grad)
        self._leaves.append(own if needs_grad else None)
        return own

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
        self._split, self._handles, self._leaves = None, [], []
        clear_recompute_session(self._session)

    @contextlib.contextmanager
    def _step(self, step: str, after: ChunkState) -> Iterator[None]:
        with self._lock:
            name = f"stage {self.stage}, micro-batch {self.micro_batch}, {step}"
            if self._state not in _ALLOWED[step]:
                allowed = " or ".join(repr(state.value) for state in _ALLOWED[step])
                raise ChunkError(f"{name}: needs a chunk that is {allowed}, but this one is {self._state.value!r}.")
            try:
                yield
            except BaseException as error:
                self.release()
                _put_in_front(error, name)
                raise
            self._state = after


def _put_in_front(error: BaseException, name: str) -> None:
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{name}: {error.args[0]}", *error.args[1:])
