"""MindSpore's non-reentrant recompute as the engine beneath checkpointed blocks.

1. MindSpore makes one handle per call of a block. It holds a placeholder for each tensor that was saved and, per
   recompute key, the tensors that a replay made for them. The key is the session's id, or the backward engine's where
   there is no session.
2. `BlockHandle` is that handle, taught to tell the block that it is replaying, to stop when nothing more is needed, to
   leave everything as it found it, and to release the block's call records when nobody can want them any more.
3. The recomputed inputs of excluded regions are kept where MindSpore keeps its own recomputed tensors. So sessions,
   retention and clearing treat them alike, and they die with the operator that saved them.
4. MindSpore's own early stop is off. A replay ends in front of an operator (early_stop.py) or an excluded region after
   which nothing is made that is still waited for.
5. A replay that raises leaves no trace: flags, graph, hooks, counters and random state are as before, and the error is
   the block's own.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import Tensor, recompute
from mindspore.common.generator import get_rng_state, set_rng_state
from mindspore.common.recompute import (
    _clear_recompute_session,
    _recompute_handle_collector,
    _recompute_handle_collector_ctx,
    _recompute_session,
    _RecomputeHandle,
    _RecomputeSession,
)
from mindspore.graph.api import _pynative_executor

from hyper_parallel.platform.mindspore.early_stop import Endings, stop_near_the_end
from hyper_parallel.platform.recompute_state import (
    Invocation,
    ReplayFrame,
    ReplayMismatchError,
    StartOver,
    UnsavedOutputError,
    current_frame,
)

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.common.recompute._clear_recompute_session",
    "mindspore.common.recompute._recompute_handle_collector",
    "mindspore.common.recompute._recompute_handle_collector_ctx",
    "mindspore.common.recompute._recompute_session",
    "mindspore.common.recompute._RecomputeHandle",
    "mindspore.common.recompute._RecomputeHandle.clear_session",
    "mindspore.common.recompute._RecomputeHandle.recompute",
    "mindspore.common.recompute._RecomputeHandle.recover_inputs",
    "mindspore.common.recompute._RecomputeSession",
    "mindspore.graph.api._pynative_executor",
)


ENGINE_MODULE = _RecomputeHandle.__module__
"""Where MindSpore's own recompute lives: who counts what a step leaves behind counts the objects of this module too."""


class _SaveCounter(defaultdict):
    """Counts, per recompute key, the tensors that a replay has saved, and lets the replay end in time."""

    def __init__(self) -> None:
        super().__init__(int)
        self.frames: dict[Any, ReplayFrame] = {}

    def __setitem__(self, recompute_key: Any, made: int) -> None:
        super().__setitem__(recompute_key, made)
        frame = self.frames[recompute_key]
        frame.made = made
        stop_near_the_end(frame)


class BlockHandle(_RecomputeHandle):
    """The recompute handle of one call of a checkpointed block."""

    invocation: Invocation
    endings: Endings
    engine_key: Any
    makers: tuple[BlockHandle, ...]
    recovered: list | None

    @staticmethod
    def adopt(
        handle: _RecomputeHandle, invocation: Invocation, makers: tuple[BlockHandle, ...], endings: Endings
    ) -> None:
        """Turn MindSpore's handle, which has saved nothing yet, into a `BlockHandle`.

        Args:
            handle: MindSpore's handle.
            invocation: The call that it is for.
            makers: The handles of the blocks whose replays make this block's inputs.
            endings: What is known of how the block's replays end.
        """
        handle.__class__ = BlockHandle
        handle.invocation = invocation
        handle.endings = endings
        handle.engine_key = None
        handle.makers = makers
        handle.recovered = None
        handle.placeholder_counter = _SaveCounter()

    def recompute(self, recompute_key: Any) -> None:
        """Replay the block for `recompute_key`, once per key."""
        if self.is_recomputed.get(recompute_key):
            return  # at each saved tensor that is read; a session knows the handle since the replay
        session = _recompute_session.get()
        if session is None:
            self._forget_engine(recompute_key)
        elif session.retain_on_unpack:
            self.invocation.retain(recompute_key)
        try:
            while not self._replay(recompute_key):
                pass
        finally:
            self.recovered = None
        self.invocation.replayed()

    def recover_inputs(self) -> list:
        """Return the block's inputs. A replay that starts over gets them again: an outer block hands them out once."""
        if self.recovered is None:
            # An error that is raised while MindSpore reads several saved tensors loses those that it has read.
            for maker in self.makers:
                maker.recompute(current_recompute_key())
            self.recovered = super().recover_inputs()
        return self.recovered

    def clear_session(self, session_id: Any) -> None:
        """Drop what was recomputed for the session, and the call records if no other session retains them."""
        super().clear_session(session_id)
        self.invocation.session_cleared(session_id)

    def bind(self, input_handle: Any, tensor: Tensor, recompute_key: Any) -> None:
        """Keep a recomputed input of an excluded region for the operators that saved `input_handle`."""
        self.recomputed_data[recompute_key][input_handle] = tensor.data

    def _replay(self, recompute_key: Any) -> bool:
        """Replay once; return False if it has to be done again, with outputs that turned out to be needed."""
        frame = ReplayFrame(self.invocation, recompute_key, self, self._needed())
        self.placeholder_counter.frames[recompute_key] = frame
        caller_state = get_rng_state()
        token = current_frame.set(frame)
        try:
            super().recompute(recompute_key)
            if frame.stopper is not None:
                frame.stopper.learn()
            if not frame.satisfied():
                frame.check_complete(len(self.placeholders))
        except Exception as error:
            self._undo(recompute_key, frame)
            if isinstance(error, StartOver) or frame.learn_from(error) or _learn_set(error, frame):
                return False
            explanation = self._explanation(error, frame)
            if explanation is None:
                raise
            raise explanation from error
        except BaseException:
            self._undo(recompute_key, frame)
            raise
        finally:
            current_frame.reset(token)
            del self.placeholder_counter.frames[recompute_key]
            if frame.stopper is not None:
                frame.stopper.__exit__(None, None, None)
                frame.stopper = None  # it knows the frame
            set_rng_state(caller_state)
        frame.learn_not_needed(len(self.placeholders))
        return True

    def _needed(self) -> int:
        """Return how many tensors, in order, a replay has to save until nobody waits for any more of them."""
        for position in range(len(self.placeholders) - 1, -1, -1):
            if self.placeholders[position]() is not None:
                return position + 1
        return 0

    def _undo(self, recompute_key: Any, frame: ReplayFrame) -> None:
        """Undo what MindSpore leaves behind when a replay raises; its own frames restore the flags and the hooks."""
        done = self.is_recomputed.get(recompute_key)
        super().clear_session(recompute_key)
        if frame.started and not done:
            # An error of an operator has unwound the graph already, and then MindSpore has none to end.
            with contextlib.suppress(RuntimeError):
                _pynative_executor.end_empty_graph()

    def _explanation(self, error: Exception, frame: ReplayFrame) -> Exception | None:
        """Return the error that tells the user more than `error`, None if it is the user's own."""
        if isinstance(error, (ReplayMismatchError, UnsavedOutputError)):
            return None
        if frame.made > len(self.placeholders):
            return ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' saved more tensors than the {len(self.placeholders)} "
                "that the forward saved; make the block run the same operators in its replay as in its forward."
            )
        if frame.plain_outputs and _CHANGES_LEAF in str(error):
            names = ", ".join(sorted({f"'{region.name}'" for region in frame.plain_outputs}))
            return RuntimeError(
                f"Block '{self.invocation.block}' changed the output of an excluded region ({names}) in place, but the "
                "replay gets that output as the forward's change left it, and would change it again; let the block "
                "change a copy."
            )
        misused = frame.misused_stand_in(str(error))
        return None if misused is None else misused.unsaved_output()

    def _forget_engine(self, recompute_key: Any) -> None:
        """Drop what an earlier backward pass over this graph left unread; without a session nobody else can read it."""
        if self.engine_key is not None:
            super().clear_session(self.engine_key)
        self.engine_key = recompute_key


_SETS_ELEMENTS = "Can not modify tensor id of input tensor"
_CHANGES_LEAF = "leaf tensor that requires grad is being used in an inplace operator"
"""What MindSpore says of `t[i] = v`, which gives `t` a new storage, and of `t.copy_(v)`, where `t` is a leaf."""


def _learn_set(error: Exception, frame: ReplayFrame) -> bool:
    """Return whether to start over with cached outputs that are no leaves, as the block sets elements of one."""
    if _SETS_ELEMENTS not in str(error):
        return False
    regions = [region for region in frame.plain_outputs if not region.output_in_graph]
    for region in regions:
        region.output_in_graph = True
    return bool(regions)


class _HandleCollector(list):
    """Receives the one handle that a call of a block makes, then steps aside for the blocks inside."""

    def __init__(self, started: Callable[[BlockHandle], None], outer: list | None) -> None:
        super().__init__()
        self._started = started
        self._outer = outer

    def append(self, handle: _RecomputeHandle) -> None:
        """Pass the handle on to the block, and to whoever else collects handles."""
        _recompute_handle_collector.set(self._outer)
        self._started(handle)
        if self._outer is not None:
            self._outer.append(handle)


def run_block(block: Callable[..., Any], started: Callable[[Any], None], tensors: Sequence[Tensor]) -> Any:
    """Call `block(*tensors)` under MindSpore's recompute.

    Args:
        block: Is called in the forward and in each replay.
        started: Is called with MindSpore's handle before the forward. It is not called where no gradient is wanted:
            then the call is a plain one.
        tensors: What the handle has to keep, or to have recomputed by an outer block.
    """
    token = _recompute_handle_collector.set(_HandleCollector(started, _recompute_handle_collector.get()))
    try:
        return recompute(block, *tensors, use_reentrant=False, early_stop=False)
    finally:
        _recompute_handle_collector.reset(token)


def current_recompute_key() -> Any:
    """Return the key of this thread's recomputed tensors: the session's, else the backward engine's."""
    session = _recompute_session.get()
    if session is not None:
        return session.session_id
    engine = _pynative_executor.get_current_autodiff_engine_id()
    return engine if engine != -1 else uuid.uuid4().int


class _SessionContext:
    """The thread is in a session. No generator: that costs several times as much, and each step enters one."""

    __slots__ = ("_session", "_token")

    def __init__(self, session_id: Any, retain_on_unpack: bool) -> None:
        self._session = _RecomputeSession(session_id, retain_on_unpack)

    def __enter__(self) -> Any:
        self._token = _recompute_session.set(self._session)
        return self._session.session_id

    def __exit__(self, *_: Any) -> None:
        _recompute_session.reset(self._token)


def recompute_session_ctx(
    session_id: Any = None, retain_on_unpack: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Share one recomputation between all backward passes that enter the session on their thread.

    Args:
        session_id: Key of the session; None makes a new one.
        retain_on_unpack: Whether reading a recomputed tensor keeps it for a later pass.

    Returns:
        The context for one `with`; it gives the key.
    """
    return _SessionContext(uuid.uuid4().hex if session_id is None else session_id, retain_on_unpack)


@contextlib.contextmanager
def recompute_handle_collector_ctx() -> Iterator[list[BlockHandle]]:
    """Yield a list that fills with the handles of the checkpointed blocks called inside, in forward order."""
    with _recompute_handle_collector_ctx() as handles:
        yield handles


def recompute_handle(handle: BlockHandle, session_id: Any) -> None:
    """Replay the block of `handle` now, for the session `session_id`, which this thread must have entered.

    Raises:
        ValueError: If the thread is not in that session.
    """
    session = _recompute_session.get()
    if session is None or session.session_id != session_id:
        entered = "none" if session is None else repr(session.session_id)
        raise ValueError(
            f"recompute_handle fires a replay for session {session_id!r}, but the session entered on this thread is "
            f"{entered}; call it inside recompute_session_ctx({session_id!r}, retain_on_unpack=True)."
        )
    handle.recompute(session_id)


def clear_recompute_session(session_id: Any) -> None:
    """Drop everything that was recomputed for the session, and the call records that only it retained."""
    _clear_recompute_session(session_id)
