"""When each action of a plan runs, and what its rank holds then.

Rules of time:
1. A rank runs its row in order, one action at a time, and starts each as soon as it can.
2. F of a stage needs F of the stage before, B and I need B or I of the stage after, for the same micro-batch. R and W
   need only what comes before them in their own row.
3. What crosses ranks takes latency + size / bandwidth; the rank itself is not kept busy by it.
4. If the plan has sends and receives, a message leaves when the rank reaches the send, and the receive waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeline.plan.action import COMMUNICATION, Action, PlanError
from pipeline.plan.costs import Costs, Memory
from pipeline.plan.dependencies import Dependencies
from pipeline.plan.durations import Durations
from pipeline.plan.footprint import ChunkMemory, Level, levels, live_chunks
from pipeline.plan.plan import Plan


class Event(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


class Peak(NamedTuple):
    """Where a rank holds most: the position in its row, the action, and when that starts."""

    position: int
    action: Action
    time: float


@dataclass(frozen=True)
class Simulation:
    """How a plan runs. Lists are by rank.

    Args:
        makespan: time of the whole step.
        bubble: makespan minus the work of the busiest rank.
        span_bubble: the longest idle time of a rank between its first and its last action.
        busy: work of each rank.
        peak_activations: most chunks between the start of F and the end of B or W.
        peak_memory: most memory held.
        peak_at: where that is, None for a rank without actions.
        events: what ran when.
        levels: memory during and after each event.
    """

    makespan: float
    bubble: float
    span_bubble: float
    busy: list[float]
    peak_activations: list[int]
    peak_memory: list[float]
    peak_at: list[Peak | None]
    events: list[list[Event]]
    levels: list[list[Level]]

    def memory_curve(self, rank: int) -> list[tuple[float, float]]:
        """Steps (time, memory held from then on) of a rank."""
        curve = []
        for event, level in zip(self.events[rank], self.levels[rank]):
            curve += [(event.start, level.during), (event.end, level.after)]
        return curve


def simulate(plan: Plan, costs: Costs | None = None, memory: Memory | None = None) -> Simulation:
    """Run a plan on paper.

    Args:
        plan: the plan, with or without sends and receives.
        costs: time of each stage's actions; None: one unit each for F, I and W.
        memory: what chunks hold; None: one unit for each chunk.

    Raises:
        PlanError: the plan cannot run to its end (see `pipeline.plan.validate`), or costs do not fit its stages.
    """
    events = _run(plan, costs or Costs())
    busy = [_busy(row) for row in events]
    makespan = max((row[-1].end for row in events if row), default=0.0)
    figures = ChunkMemory(memory or Memory(), plan.stages)
    rank_levels = [levels(row, figures) for row in plan.rows]
    peak_at = [_peak(row, held) for row, held in zip(events, rank_levels)]
    return Simulation(
        makespan=makespan,
        bubble=makespan - max(busy),
        span_bubble=max(_span(row) - work for row, work in zip(events, busy)),
        busy=busy,
        peak_activations=[live_chunks(row) for row in plan.rows],
        peak_memory=[held[peak.position].during if peak else 0.0 for peak, held in zip(peak_at, rank_levels)],
        peak_at=peak_at,
        events=events,
        levels=rank_levels,
    )


def _run(plan: Plan, costs: Costs) -> list[list[Event]]:
    """Run every rank as far as it gets, and again when what it waited for has come."""
    dependencies, durations = Dependencies(plan), Durations(plan, costs)
    arrival: list[float | None] = [None] * dependencies.messages
    waiting: dict[int, list[int]] = {}
    events: list[list[Event]] = [[] for _ in plan.rows]
    clock = [0.0] * len(plan.rows)
    runnable = list(range(len(plan.rows)))
    while runnable:
        rank = runnable.pop()
        row, done, now = plan.rows[rank], events[rank], clock[rank]
        while len(done) < len(row):
            action = row[len(done)]
            needs = dependencies.needs(action)
            missing = next((message for message in needs if arrival[message] is None), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            ready = max([now, *(arrival[message] for message in needs)])
            # A receive is an event for as long as it waits, any other action from when it has what it needs.
            start = now if action.kind in COMMUNICATION else ready
            now = ready + durations.of(action)
            done.append(Event(action, start, now))
            for message in dependencies.gives(action):
                arrival[message] = now + durations.delays[dependencies.lane(message)]
                runnable += waiting.pop(message, ())
        clock[rank] = now
    _complain_if_stuck(plan, events)
    return events


def _complain_if_stuck(plan: Plan, events: list[list[Event]]) -> None:
    stuck = [
        f"rank {rank} waits at position {len(done)} with {row[len(done)]}"
        for rank, (row, done) in enumerate(zip(plan.rows, events))
        if len(done) < len(row)
    ]
    if stuck:
        raise PlanError(f"expected a plan that runs to its end, saw {'; '.join(stuck)}; validate(plan) says why")


def _busy(row: list[Event]) -> float:
    return sum(event.end - event.start for event in row if event.action.kind not in COMMUNICATION)


def _span(row: list[Event]) -> float:
    compute = [event for event in row if event.action.kind not in COMMUNICATION]
    return compute[-1].end - compute[0].start if compute else 0.0


def _peak(row: list[Event], held: list[Level]) -> Peak | None:
    if not row:
        return None
    position = max(range(len(row)), key=lambda index: held[index].during)
    return Peak(position, row[position].action, row[position].start)
