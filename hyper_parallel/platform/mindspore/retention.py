"""What a recompute session keeps alive: its handles and the tensors that their replays made."""

from __future__ import annotations

from typing import Any

from mindspore.common.recompute import _clear_recompute_session as clear_recompute_session
from mindspore.common.recompute import _recompute_handle_collector_ctx as recompute_handle_collector_ctx
from mindspore.common.recompute import _recompute_session_ctx as recompute_session_ctx

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.common.recompute._clear_recompute_session",
    "mindspore.common.recompute._recompute_handle_collector_ctx",
    "mindspore.common.recompute._recompute_session_ctx",
    "mindspore.common.recompute._RecomputeHandle.recompute",
)

__all__ = ["clear_recompute_session", "recompute_handle", "recompute_handle_collector_ctx", "recompute_session_ctx"]


def recompute_handle(handle: Any, session_id: Any) -> None:
    """Replay the block of `handle` for the session, if that has not happened yet."""
    handle.recompute(session_id)
