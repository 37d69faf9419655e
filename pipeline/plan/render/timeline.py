"""What ran when on each rank, simulated or measured: the one form that all pictures are drawn from.

Its JSON form, which the executor's trace writes too:

    {"name": "1f1b", "unit": "s",
     "events": [[{"action": "0F0", "start": 0.0, "end": 1.0}, ...], ...],      a list per rank
     "memory": [[[0.0, 1.0], [3.0, 0.0], ...], ...]}                           optional: steps (time, held from then on)

An event may have more fields, as the time that it waited; they are not drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.plan.action import COMMUNICATION, Action, PlanError
from pipeline.plan.simulate import Event, Simulation

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Timeline:
    """Events and memory of every rank.

    Args:
        name: for the title.
        events: for each rank what it ran, by start.
        memory: for each rank its steps (time, held from then on); empty if that is not known.
        unit: of the times, as "s"; empty for the abstract units of a simulation.
    """

    name: str
    events: Sequence[Sequence[Event]]
    memory: Sequence[Curve] = ()
    unit: str = ""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.events)

    @property
    def end(self) -> float:
        """When the last event ends."""
        return max((event.end for row in self.events for event in row), default=0.0)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank ran, ascending."""
        return sorted({part.stage for event in self.events[rank] for part in event.action.parts})

    def compute(self, rank: int) -> Iterator[Event]:
        """The events of a rank that keep it busy: neither sends nor receives, nor a recompute that fires nothing."""
        return (
            event for event in self.events[rank] if event.action.kind not in COMMUNICATION and event.end > event.start
        )

    def communication(self, rank: int) -> Iterator[Event]:
        """The sends and receives of a rank that took time."""
        return (event for event in self.events[rank] if event.action.kind in COMMUNICATION and event.end > event.start)

    def to_json(self) -> str:
        """The JSON form."""
        events = [
            [{"action": str(event.action), "start": event.start, "end": event.end} for event in row]
            for row in self.events
        ]
        return json.dumps({"name": self.name, "unit": self.unit, "events": events, "memory": self.memory})

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Read the JSON form, or its `events` alone. Times are shifted so that the first event starts at 0.

        Raises:
            PlanError: the text is not of that form.
        """
        try:
            content = json.loads(text)
            content = {"events": content} if isinstance(content, list) else content
            events = [
                [Event(Action.parse(event["action"]), float(event["start"]), float(event["end"])) for event in row]
                for row in content["events"]
            ]
            memory = [[(float(time), float(held)) for time, held in curve] for curve in content.get("memory", ())]
            name, unit = str(content.get("name", "measured")), str(content.get("unit", ""))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                'expected a trace such as {"events": [[{"action": "0F0", "start": 0.0, "end": 1.0}, ...], ...]}, '
                f"saw one that cannot be read ({type(error).__name__}: {error}); check the file"
            ) from None
        origin = min((event.start for row in events for event in row), default=0.0)
        events = [
            sorted((Event(action, start - origin, end - origin) for action, start, end in row), key=lambda e: e.start)
            for row in events
        ]
        return Timeline(name, events, [[(time - origin, held) for time, held in curve] for curve in memory], unit)


def simulated(simulation: Simulation, name: str, unit: str = "") -> Timeline:
    """The timeline of a simulation."""
    curves = [simulation.memory_curve(rank) for rank in range(len(simulation.events))]
    return Timeline(name, simulation.events, curves, unit)
