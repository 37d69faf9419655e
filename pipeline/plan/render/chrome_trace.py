"""Timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each timeline is a process, each rank a thread in it, and the memory of each rank a counter.
The form is that of "Trace Event Format" (Google, 2016): complete events "X", counters "C", names "M".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.plan.render.timeline import Timeline

# A trace counts microseconds. One abstract unit of a simulation is shown as a millisecond.
_MICROSECONDS = {"": 1e3, "s": 1e6, "ms": 1e3, "us": 1.0}


def chrome_trace(timelines: Sequence[Timeline]) -> str:
    """The JSON text of a Chrome trace.

    Args:
        timelines: what to show, as the simulated and the measured one. Units are "s", "ms", "us" or none; any other is
            shown as if it were none.
    """
    events = [event for process, timeline in enumerate(timelines) for event in _events(process, timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    unit = _MICROSECONDS.get(timeline.unit, _MICROSECONDS[""])
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.name}}
    for rank in range(timeline.ranks):
        place = {"pid": process, "tid": rank}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": rank}}
        for action, start, end in timeline.events[rank]:
            details = {"stage": action.stage, "micro_batch": action.micro_batch}
            time = {"ts": start * unit, "dur": (end - start) * unit}
            yield {"ph": "X", "name": str(action), "cat": action.kind.value, **place, **time, "args": details}
    for rank, curve in enumerate(timeline.memory):
        for time, held in curve:
            yield {
                "ph": "C",
                "name": f"memory of rank {rank}",
                "pid": process,
                "ts": time * unit,
                "args": {"held": held},
            }
