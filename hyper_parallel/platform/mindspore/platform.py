"""What MindSpore offers to the platform independent part and to the pipeline, under one roof."""

from __future__ import annotations

from hyper_parallel.platform.mindspore.activation_checkpoint.checkpoint_exclude_wrapper import (
    checkpoint_exclude_wrapper,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.checkpoint_wrapper import checkpoint, checkpoint_wrapper
from hyper_parallel.platform.mindspore.recompute import (
    clear_recompute_session,
    recompute_handle,
    recompute_handle_collector_ctx,
    recompute_session_ctx,
)

__all__ = [
    "checkpoint",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "clear_recompute_session",
    "recompute_handle",
    "recompute_handle_collector_ctx",
    "recompute_session_ctx",
]
