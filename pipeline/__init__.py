"""Pipeline parallelism: plans as data, and their execution.

`pipeline.plan` needs no MindSpore. The names below do, and are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

_SOURCES = {
    "PipelineStage": "pipeline.execution.stage",
    "BatchDimSpec": "pipeline.execution.microbatch",
    "SharedParameterInfo": "pipeline.execution.shared_parameters",
    "Schedule": "pipeline.execution.schedule",
    **dict.fromkeys(
        (
            "Schedule1F1B",
            "ScheduleDualPipeV",
            "ScheduleGPipe",
            "ScheduleInterleaved1F1B",
            "ScheduleLoopedBFS",
            "ScheduleVHalf",
            "ScheduleVMin",
            "ScheduleZBH1",
            "ScheduleZBH2",
            "ScheduleZBV",
        ),
        "pipeline.execution.named_schedules",
    ),
    "PipelineError": "pipeline.execution.faults",
    "ActionError": "pipeline.execution.faults",
}

__all__ = sorted(_SOURCES)


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_SOURCES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SOURCES})
