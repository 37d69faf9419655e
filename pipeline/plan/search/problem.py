"""What the search works on: the figures of a pipeline by stage, and rows of numbered steps.

A step is one F, I, W or R of a chunk, as a number (`Problem.step`). The search splits every backward: I with W right
after it is a B that hands its gradient on earlier. Where the split brings nothing, `to_plan` leaves B whole.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.plan.action import Action, Kind
from pipeline.plan.costs import Costs, Memory
from pipeline.plan.durations import Durations
from pipeline.plan.footprint import ChunkMemory
from pipeline.plan.placement import Placement
from pipeline.plan.plan import Plan

F, I, W, R = range(4)  # noqa: E741
_KINDS = {Kind.F: F, Kind.I: I, Kind.W: W, Kind.R: R}
_ACTIONS = (Kind.F, Kind.I, Kind.W, Kind.R)
TOLERANCE = 1e-9

Rows = list[list[int]]


class Timing(NamedTuple):
    """When steps run.

    Args:
        makespan: time of the whole.
        start: by step; -1 for steps that are in no row.
        end: by step.
    """

    makespan: float
    start: list[float]
    end: list[float]


class Problem:
    """A placement with its costs, memory and limits.

    Args:
        placement: which rank holds which stage.
        micro_batches: how many micro-batches.
        costs: times; overlapped pairs are not used.
        memory: what chunks hold.
        limits: most memory of each rank.
        replays_lazily: a checkpointed chunk is replayed by its dx, not by a step R of its own.
    """

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        costs: Costs,
        memory: Memory,
        limits: Sequence[float],
        replays_lazily: bool = False,
    ) -> None:
        self.placement, self.micro_batches, self.limits = placement, micro_batches, tuple(limits)
        self.costs, self.memory, self.replays_lazily = costs, memory, replays_lazily
        self.ranks, self.stages = placement.ranks, placement.stages
        self.rank_of = placement.rank_by_stage
        self.stages_of = [placement.stages_of(rank) for rank in range(placement.ranks)]
        empty = Plan(((),) * placement.ranks, placement, micro_batches)
        durations = Durations(empty, costs)
        self.forward, self.backward_input = durations.forward, durations.backward_input
        self.backward_weight, self.recompute = durations.backward_weight, durations.recompute
        self.forward_delay = durations.delays[::2]
        self.gradient_delay = durations.delays[1::2]
        self.figures = ChunkMemory(memory, self.stages)

    def step(self, kind: int, stage: int, micro_batch: int) -> int:
        """The number of a step."""
        return (kind * self.stages + stage) * self.micro_batches + micro_batch

    def parts(self, step: int) -> tuple[int, int, int]:
        """(kind, stage, micro-batch) of a step."""
        of, micro_batch = divmod(step, self.micro_batches)
        kind, stage = divmod(of, self.stages)
        return kind, stage, micro_batch

    @property
    def work(self) -> list[float]:
        """The time that each rank computes, without recompute."""
        each = [sum(of) for of in zip(self.forward, self.backward_input, self.backward_weight)]
        return [self.micro_batches * sum(each[stage] for stage in stages) for stages in self.stages_of]

    def step_times(self, checkpointed: Sequence[bool]) -> list[float]:
        """The duration of each step, where some stages are checkpointed."""
        lazy = [r if self.replays_lazily and replayed else 0.0 for r, replayed in zip(self.recompute, checkpointed)]
        inputs = [b + r for b, r in zip(self.backward_input, lazy)]
        by_kind = (self.forward, inputs, self.backward_weight, self.recompute)
        return [time for times in by_kind for time in times for _ in range(self.micro_batches)]

    @functools.cached_property
    def sources(self) -> list[int]:
        """For each step the step of another stage that it needs, or -1."""
        source = [-1] * (4 * self.stages * self.micro_batches)
        for micro_batch in range(self.micro_batches):
            for stage in range(1, self.stages):
                source[self.step(F, stage, micro_batch)] = self.step(F, stage - 1, micro_batch)
                source[self.step(I, stage - 1, micro_batch)] = self.step(I, stage, micro_batch)
        return source

    @functools.cached_property
    def delays(self) -> list[float]:
        """For each step how long its result takes to the step that needs it."""
        none = [0.0] * self.stages
        by_kind = (self.forward_delay, self.gradient_delay, none, none)
        return [delay for delays in by_kind for delay in delays for _ in range(self.micro_batches)]

    def timing(self, rows: Rows, times: Sequence[float]) -> Timing | None:
        """When the steps of the rows run; None if they deadlock. `times` are those of `step_times`."""
        sources, delays = self.sources, self.delays
        start, end = [-1.0] * len(sources), [-1.0] * len(sources)
        position, clock = [0] * self.ranks, [0.0] * self.ranks
        waiting: dict[int, int] = {}
        runnable = list(range(self.ranks))
        while runnable:
            rank = runnable.pop()
            row, now = rows[rank], clock[rank]
            for index in range(position[rank], len(row)):
                step = row[index]
                source = sources[step]
                if source >= 0:
                    arrival = end[source]
                    if arrival < 0.0:
                        waiting[source] = rank
                        break
                    arrival += delays[source]
                    if arrival > now:
                        now = arrival
                start[step] = now
                now += times[step]
                end[step] = now
                if step in waiting:
                    runnable.append(waiting.pop(step))
            else:
                index = len(row)
            position[rank], clock[rank] = index, now
        if any(position[rank] < len(rows[rank]) for rank in range(self.ranks)):
            return None
        return Timing(max(clock), start, end)

    def peak(self, row: Sequence[int], checkpointed: Sequence[bool]) -> float:
        """The most memory that a row holds. The rules are those of `pipeline.plan.footprint`."""
        figures, stages, micro_batches = self.figures, self.stages, self.micro_batches
        level = peak = 0.0
        for step in row:
            of = step // micro_batches
            kind, stage = divmod(of, stages)
            kept = figures.kept[stage] if checkpointed[stage] else figures.activation[stage]
            whole = kept + (figures.recomputed[stage] if checkpointed[stage] else 0.0)
            pending = whole if figures.pending is None else figures.pending[stage]
            if kind == F:
                level += kept
            elif kind == R or (kind == I and checkpointed[stage] and self.replays_lazily):
                level += figures.recomputed[stage]
            peak = max(peak, level)
            if kind == I:
                level += pending - whole
            elif kind == W:
                level -= pending
        return peak

    def fits(self, rank: int, row: Sequence[int], checkpointed: Sequence[bool]) -> bool:
        """Whether a row keeps within the limit of its rank."""
        return self.limits[rank] == float("inf") or self.peak(row, checkpointed) <= self.limits[rank] + TOLERANCE

    def from_plan(self, plan: Plan) -> tuple[Rows, tuple[bool, ...]]:
        """The rows of a plan in steps, and which stages it checkpoints. Overlapped pairs are opened."""
        replayed = {part.stage for row in plan.rows for action in row for part in action.parts if part.kind is Kind.R}
        rows: Rows = []
        for actions in plan.rows:
            row: list[int] = []
            for action in actions:
                for stage, kind, micro_batch, _, _ in action.parts:
                    if kind is Kind.B:
                        row += [self.step(I, stage, micro_batch), self.step(W, stage, micro_batch)]
                    elif kind is not Kind.R or not self.replays_lazily:
                        row.append(self.step(_KINDS[kind], stage, micro_batch))
            rows.append(row)
        return rows, tuple(stage in replayed for stage in range(self.stages))

    def to_plan(self, rows: Rows, checkpointed: Sequence[bool], name: str, whole: Sequence[bool]) -> Plan:
        """The plan of the rows. On the ranks where `whole` holds, I with its W right after it becomes B."""
        return Plan(
            tuple(tuple(self._actions(row, checkpointed, merge)) for row, merge in zip(rows, whole)),
            self.placement,
            self.micro_batches,
            name,
        )

    def _actions(self, row: Sequence[int], checkpointed: Sequence[bool], merge: bool) -> list[Action]:
        actions: list[Action] = []
        for step in row:
            kind, stage, micro_batch = self.parts(step)
            if kind == I and checkpointed[stage] and self.replays_lazily:
                actions.append(Action(stage, Kind.R, micro_batch, (), 0))
            if merge and kind == W and actions[-1] == Action(stage, Kind.I, micro_batch):
                actions[-1] = Action(stage, Kind.B, micro_batch)
            else:
                actions.append(Action(stage, _ACTIONS[kind], micro_batch))
        return actions
