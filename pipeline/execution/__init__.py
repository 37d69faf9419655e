"""Execution of a plan on MindSpore."""

from __future__ import annotations

# Says in one sentence when MindSpore is missing or not supported, before any other module asks it for a name.
import hyper_parallel  # noqa: F401
