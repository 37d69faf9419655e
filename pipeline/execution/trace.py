"""What a rank did in a step, and when: the form of the simulator's events, with the time spent waiting added."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from pipeline.plan import Action


class TraceEvent(NamedTuple):
    """One action that was run.

    Attributes:
        action: what was run.
        start: when, in seconds of the machine's monotonic clock; after the wait for its inputs.
        end: when it was done.
        waiting: how long the rank waited before `start` for what other ranks sent.
    """

    action: Action
    start: float
    end: float
    waiting: float


class Trace:
    """The events of one rank in one step."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def add(self, action: Action, asked: float, start: float, end: float) -> None:
        """Note an action: when its turn came, when its inputs were there, and when it was done."""
        self.events.append(TraceEvent(action, start, end, start - asked))

    @staticmethod
    def now() -> float:
        """The clock of all events: the same for all processes of a machine."""
        return time.monotonic()


def to_rows(events: Iterable[TraceEvent], origin: float = 0.0) -> list[dict[str, Any]]:
    """Events as plain values, times in seconds after `origin`: a row of the JSON form that `plan.render` draws."""
    return [
        {
            "action": str(event.action),
            "start": event.start - origin,
            "end": event.end - origin,
            "waiting": event.waiting,
        }
        for event in events
    ]
