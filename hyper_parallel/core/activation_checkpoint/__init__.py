"""Public functions of activation recompute."""

from __future__ import annotations

from hyper_parallel.core.activation_checkpoint.activation_checkpoint import (
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
)
from hyper_parallel.core.activation_checkpoint.recompute_state import (
    Phase,
    RecomputeState,
    ReplayMismatchError,
    UnsavedOutputError,
    get_recompute_state,
    is_recomputing,
)

__all__ = [
    "Phase",
    "RecomputeState",
    "ReplayMismatchError",
    "UnsavedOutputError",
    "checkpoint",
    "checkpoint_exclude_wrapper",
    "checkpoint_wrapper",
    "get_recompute_state",
    "is_recomputing",
]
