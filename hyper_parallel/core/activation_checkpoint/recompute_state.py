"""The phase of activation recompute, as users see it.

The states live in `hyper_parallel.platform.recompute_state`, below everything that changes them.
"""

from __future__ import annotations

from hyper_parallel.platform.recompute_state import (
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
    "get_recompute_state",
    "is_recomputing",
]
