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

from pipeline.plan.action import COMMUNICATION, Action, Kind, PlanError
from pipeline.plan.costs import Costs, Memory, per_stage, share_of_last
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
    events = _run(plan, _Durations(plan, costs or Costs()))
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


class _Durations:
    """How long each action of a plan takes, and each transfer."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        stages = plan.stages
        self.forward = per_stage(costs.forward, stages, "forward")
        self.backward_input = per_stage(costs.backward_input, stages, "backward_input")
        self.backward_weight = per_stage(costs.backward_weight, stages, "backward_weight")
        self.recompute = per_stage(costs.recompute, stages, "recompute")
        self.blocks = per_stage(costs.blocks, stages, "blocks")
        self.overlapped = None
        if costs.overlapped is not None:
            self.overlapped = per_stage(costs.overlapped, stages, "overlapped")
        self.send_forward = costs.communication.forward_times(stages)
        self.send_backward = costs.communication.backward_times(stages)
        self.left_out = self._replayed_by_backward(plan)

    def _replayed_by_backward(self, plan: Plan) -> dict[tuple[int, int], float]:
        """For chunks whose R leaves blocks out: the time that their backward spends on them."""
        return {
            (action.stage, action.micro_batch): self.recompute[action.stage]
            * (1.0 - share_of_last(action.last_blocks, self.blocks[action.stage]))
            for row in plan.rows
            for action in row
            if action.last_blocks is not None
        }

    def of(self, action: Action) -> float:
        stage, kind, micro_batch, sub_actions, last_blocks = action
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.W:
            return self.backward_weight[stage]
        if kind is Kind.R:
            return self.recompute[stage] * share_of_last(last_blocks, self.blocks[stage])
        if kind is Kind.I or kind is Kind.B:
            time = self.backward_input[stage] + self.left_out.get((stage, micro_batch), 0.0)
            return time + self.backward_weight[stage] if kind is Kind.B else time
        if kind is Kind.OVERLAP_F_B:
            if self.overlapped is None:
                return sum(map(self.of, sub_actions))
            ran_backward = sub_actions[1]
            return self.overlapped[stage] + self.left_out.get((ran_backward.stage, ran_backward.micro_batch), 0.0)
        return 0.0


def _run(plan: Plan, durations: _Durations) -> list[list[Event]]:
    """Run every rank as far as it gets, and again when what it waited for has come.

    A message is an index: 2 * (stage * micro_batches + micro_batch), + 1 for a gradient, that says whose output it is.
    """
    micro_batches = plan.micro_batches
    arrival: list[float | None] = [None] * (2 * plan.stages * micro_batches)
    waiting: dict[int, list[int]] = {}
    events: list[list[Event]] = [[] for _ in plan.rows]
    clock = [0.0] * len(plan.rows)
    explicit = plan.has_communication
    crosses = [plan.placement.crosses(stage) for stage in range(plan.stages)]
    runnable = list(range(len(plan.rows)))
    while runnable:
        rank = runnable.pop()
        row, done, now = plan.rows[rank], events[rank], clock[rank]
        for action in row[len(done) :]:
            start = now
            for message in _needs(action, plan.stages, micro_batches, explicit, crosses):
                ready = arrival[message]
                if ready is None:
                    waiting.setdefault(message, []).append(rank)
                    break
                start = max(start, ready)
            else:
                received = action.kind is Kind.RECV_F or action.kind is Kind.RECV_B
                event = Event(action, now if received else start, start + durations.of(action))
                done.append(event)
                now = event.end
                for message, delay in _gives(action, durations, plan.stages, micro_batches, explicit, crosses):
                    arrival[message] = now + delay
                    runnable += waiting.pop(message, ())
                continue
            break
        clock[rank] = now
    _complain_if_stuck(plan, events)
    return events


def _needs(action: Action, stages: int, micro_batches: int, explicit: bool, crosses: list[bool]) -> list[int]:
    """The messages that an action waits for."""
    messages = []
    for stage, kind, micro_batch, _, _ in action.parts:
        if kind is Kind.RECV_F or (kind is Kind.F and stage and not (explicit and crosses[stage - 1])):
            messages.append(2 * ((stage - 1) * micro_batches + micro_batch))
        elif kind is Kind.RECV_B or (
            (kind is Kind.B or kind is Kind.I) and stage + 1 < stages and not (explicit and crosses[stage])
        ):
            messages.append(2 * ((stage + 1) * micro_batches + micro_batch) + 1)
    return messages


def _gives(
    action: Action, durations: _Durations, stages: int, micro_batches: int, explicit: bool, crosses: list[bool]
) -> list[tuple[int, float]]:
    """The messages that an action sends on its way, and how long they take."""
    messages = []
    for stage, kind, micro_batch, _, _ in action.parts:
        if kind is Kind.F or kind is Kind.SEND_F:
            far = stage + 1 < stages and crosses[stage]
            if (kind is Kind.SEND_F) == (explicit and far):
                messages.append((2 * (stage * micro_batches + micro_batch), durations.send_forward[stage] * far))
        elif kind is Kind.B or kind is Kind.I or kind is Kind.SEND_B:
            far = stage > 0 and crosses[stage - 1]
            if (kind is Kind.SEND_B) == (explicit and far):
                messages.append((2 * (stage * micro_batches + micro_batch) + 1, durations.send_backward[stage] * far))
    return messages


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
