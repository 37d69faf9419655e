"""Activation recompute with excluded regions, and the platform layer beneath it."""

from __future__ import annotations

# Says in one sentence when MindSpore is missing or not supported, before any other module asks it for a name.
import hyper_parallel.platform.mindspore  # noqa: F401
