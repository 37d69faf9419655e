"""MindSpore's non-reentrant recompute as the engine beneath checkpointed blocks.

1. MindSpore makes one handle per call of a block, holding placeholders for the tensors that were saved and, per recompute key,
   the tensors that a replay made for them. The key is the session's id, or the backward engine's where there is no session.
2. `BlockHandle` is that handle, taught three things: to tell the block that it is replaying, to leave everything as it found it
   when the replay raises, and to release the block's call records when nobody can want them any more.
3. The recomputed inputs of excluded regions are kept where MindSpore keeps its own recomputed tensors. So sessions, retention
   and clearing treat them alike, and they die with the operator that saved them.
4. `early_stop=False`, because MindSpore's stop loses a tensor and the caller's random state at each replay.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import Tensor, recompute
from mindspore.common.generator import get_rng_state, set_rng_state
from mindspore.common.recompute import (
    _clear_recompute_session,
    _recompute_handle_collector,
    _recompute_handle_collector_ctx,
    _recompute_session,
    _recompute_session_ctx,
    _RecomputeHandle,
)
from mindspore.graph.api import _pynative_executor

from hyper_parallel.platform.recompute_state import Invocation, ReplayFrame, ReplayMismatchError, current_frame

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.common.recompute._clear_recompute_session",
    "mindspore.common.recompute._recompute_handle_collector",
    "mindspore.common.recompute._recompute_handle_collector_ctx",
    "mindspore.common.recompute._recompute_session",
    "mindspore.common.recompute._recompute_session_ctx",
    "mindspore.common.recompute._RecomputeHandle",
    "mindspore.common.recompute._RecomputeHandle.recompute",
    "mindspore.common.recompute._RecomputeHandle.clear_session",
    "mindspore.graph.api._pynative_executor",
)


class BlockHandle(_RecomputeHandle):
    """The recompute handle of one call of a checkpointed block."""

    invocation: Invocation

    def recompute(self, recompute_key: Any) -> None:
        """Replay the block for `recompute_key`, once per key."""
        if self.is_recomputed.get(recompute_key):
            super().recompute(recompute_key)
            return
        session = _recompute_session.get()
        if session is not None and session.retain_on_unpack:
            self.invocation.retain(recompute_key)
        frame = ReplayFrame(self.invocation, self._binder(recompute_key))
        caller_state = get_rng_state()
        token = current_frame.set(frame)
        try:
            super().recompute(recompute_key)
            frame.finished = True
            self._check_complete(recompute_key, frame)
        except BaseException:
            self._forget_failed_replay(recompute_key, frame)
            raise
        finally:
            current_frame.reset(token)
            set_rng_state(caller_state)
        self.invocation.replayed()

    def clear_session(self, session_id: Any) -> None:
        """Drop what was recomputed for the session, and the call records if no other session retains them."""
        super().clear_session(session_id)
        self.invocation.session_cleared(session_id)

    def _binder(self, recompute_key: Any) -> Callable[[Any, Tensor], None]:
        def bind(handle: Any, tensor: Tensor) -> None:
            self.recomputed_data[recompute_key][handle] = tensor.data

        return bind

    def _check_complete(self, recompute_key: Any, frame: ReplayFrame) -> None:
        frame.check_complete()
        made = self.placeholder_counter[recompute_key]
        if made != len(self.placeholders):
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' saved {made} tensors, but the forward saved "
                f"{len(self.placeholders)}; make the block run the same operators in its replay as in its forward."
            )

    def _forget_failed_replay(self, recompute_key: Any, frame: ReplayFrame) -> None:
        """Undo what MindSpore leaves behind when a replay raises; its own frames restore the flags and the hooks."""
        super().clear_session(recompute_key)
        if frame.started and not frame.finished:
            _pynative_executor.end_empty_graph()


class _HandleCollector(list):
    """Receives the one handle that a call of a block makes, before its forward, and steps aside for the blocks inside."""

    def __init__(self, adopt: Callable[[BlockHandle], None], outer: list | None) -> None:
        super().__init__()
        self._adopt = adopt
        self._outer = outer

    def append(self, handle: _RecomputeHandle) -> None:
        """Turn the handle into a `BlockHandle` and pass it on."""
        _recompute_handle_collector.set(self._outer)
        handle.__class__ = BlockHandle
        self._adopt(handle)
        if self._outer is not None:
            self._outer.append(handle)


def run_block(block: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """Call `block(*tensors)` under MindSpore's recompute.

    `block.adopt(handle)` is called with the handle before the forward. It is not called where no gradient is wanted: then the
    call is a plain one.
    """
    token = _recompute_handle_collector.set(_HandleCollector(block.adopt, _recompute_handle_collector.get()))
    try:
        return recompute(block, *tensors, use_reentrant=False, early_stop=False)
    finally:
        _recompute_handle_collector.reset(token)


def current_recompute_key() -> Any:
    """Return the key that this thread's recomputed tensors are kept under: the session's, else the backward engine's."""
    session = _recompute_session.get()
    if session is not None:
        return session.session_id
    engine = _pynative_executor.get_current_autodiff_engine_id()
    return engine if engine != -1 else uuid.uuid4().int


def retains_on_unpack() -> bool:
    """Return whether this thread's session keeps what is read, for a later backward pass."""
    session = _recompute_session.get()
    return session is not None and session.retain_on_unpack


@contextlib.contextmanager
def recompute_session_ctx(session_id: Any = None, retain_on_unpack: bool = False) -> Iterator[Any]:
    """Share one recomputation between all backward passes that enter the session on their thread.

    Args:
        session_id: Key of the session; None makes a new one.
        retain_on_unpack: Whether reading a recomputed tensor keeps it for a later pass.

    Yields:
        The key.
    """
    with _recompute_session_ctx(session_id, retain_on_unpack) as key:
        yield key


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
    """Drop everything that was recomputed for the session and the call records that only it retained."""
    _clear_recompute_session(session_id)
