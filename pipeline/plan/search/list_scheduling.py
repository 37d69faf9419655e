"""List scheduling: whenever a rank is free it runs the most urgent of its steps that are ready and fit in memory.

The rules:
1. Urgency is a line per stage and kind: with micro-batch k it grows by the pace (the work of the busiest rank for one
   micro-batch), so that the pattern of the steady state repeats. `Policy` holds where the lines start.
2. The micro-batches of a stage keep their order, for each kind of step.
3. A rank may wait for a more urgent step that it knows to arrive soon (`patience`), instead of starting a long one.
4. A step that takes memory is started only if, after it, the micro-batches in flight could still be finished one after
   the other, oldest first, each within what is free then (the banker's rule, Dijkstra 1965). The order is the same on
   all ranks, so the oldest micro-batch can always go on and nothing deadlocks, with several stages per rank too.
5. A checkpointed chunk is replayed at most one ahead per stage, while the rank has nothing more urgent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.plan.search.problem import TOLERANCE, F, I, Problem, R, Rows, W

_NEVER = float("inf")


class Policy(NamedTuple):
    """Where the urgency of each stage's steps starts (small is urgent), in units of time.

    Args:
        forward: of F, by stage.
        backward_input: of I and R, by stage.
        backward_weight: of W, by stage; infinite: only when nothing else is ready.
        patience: wait for a more urgent step if it comes within this share of the step at hand.
        checkpointed: by stage.
        limits: most memory of each rank; at most that of the problem.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    patience: float
    checkpointed: tuple[bool, ...]
    limits: tuple[float, ...]


def schedule(problem: Problem, policy: Policy) -> Rows | None:
    """The rows that a policy leads to; None if a rank cannot hold even one micro-batch."""
    ranks = [_Rank(problem, policy, rank) for rank in range(problem.ranks)]
    if not all(rank.is_safe() for rank in ranks):
        return None
    wake = [(0.0, rank) for rank in range(problem.ranks)]
    while wake:
        now, number = heapq.heappop(wake)
        rank = ranks[number]
        if now < rank.free_at:
            continue
        chosen = rank.choose(now)
        if chosen is None:
            continue
        kind, stage = chosen
        micro_batch = rank.start(kind, stage, now)
        heapq.heappush(wake, (rank.free_at, number))
        if kind == F and stage + 1 < problem.stages:
            receiver, arrival = problem.rank_of[stage + 1], rank.free_at + problem.forward_delay[stage]
            ranks[receiver].forward_arrival[stage + 1][micro_batch] = arrival
        elif kind == F:
            receiver, arrival = number, rank.free_at
            rank.gradient_arrival[stage][micro_batch] = arrival
        elif kind == I and stage:
            receiver, arrival = problem.rank_of[stage - 1], rank.free_at + problem.gradient_delay[stage]
            ranks[receiver].gradient_arrival[stage - 1][micro_batch] = arrival
        else:
            continue
        heapq.heappush(wake, (arrival, receiver))
    return [rank.row for rank in ranks]


class _Rank:
    """One rank while it is scheduled: what it has run, what has arrived, what it holds."""

    def __init__(self, problem: Problem, policy: Policy, rank: int) -> None:
        self.problem, self.policy = problem, policy
        self.stages = problem.stages_of[rank]
        self.micro_batches = problem.micro_batches
        self.pace = max(problem.work) / problem.micro_batches
        self.limit = policy.limits[rank] + TOLERANCE
        self.free_at = 0.0
        self.row: list[int] = []
        self.done = {stage: [0, 0, 0, 0] for stage in self.stages}  # next micro-batch of F, I, W, R
        self.forward_arrival = {stage: [0.0 if stage == 0 else _NEVER] * self.micro_batches for stage in self.stages}
        self.gradient_arrival = {stage: [_NEVER] * self.micro_batches for stage in self.stages}
        self.times = (problem.forward, self._dx_times(), problem.backward_weight, problem.recompute)
        self.level = 0.0
        self.held = [0.0] * self.micro_batches
        self._set_memory()

    def _dx_times(self) -> list[float]:
        lazily = [self.problem.replays_lazily and replayed for replayed in self.policy.checkpointed]
        costs = zip(self.problem.backward_input, self.problem.recompute, lazily)
        return [time + (recompute if lazy else 0.0) for time, recompute, lazy in costs]

    def _set_memory(self) -> None:
        """By stage what F takes, what a replay adds, what is held after dx; and what a micro-batch needs at most."""
        figures, checkpointed = self.problem.figures, self.policy.checkpointed
        self.taken = {s: figures.kept[s] if checkpointed[s] else figures.activation[s] for s in self.stages}
        self.replayed = {s: figures.recomputed[s] if checkpointed[s] else 0.0 for s in self.stages}
        whole = {s: self.taken[s] + self.replayed[s] for s in self.stages}
        self.pending = {s: whole[s] if figures.pending is None else figures.pending[s] for s in self.stages}
        self.most = sum(self.taken.values()) + max(self.replayed.values(), default=0.0)
        self.fires_ahead = {s: checkpointed[s] and not self.problem.replays_lazily for s in self.stages}

    def choose(self, now: float) -> tuple[int, int] | None:
        """The step to start, as (kind, stage); None to wait."""
        ready, coming = self._candidates(now)
        ready.sort()
        for urgency, kind, stage in ready:
            if kind == W or self._may_start(kind, stage):
                latest = now + self.policy.patience * self.times[kind][stage]
                return None if any(other < urgency and arrival < latest for arrival, other in coming) else (kind, stage)
        return None

    def _candidates(self, now: float) -> tuple[list[tuple[float, int, int]], list[tuple[float, float]]]:
        """The steps that are ready as (urgency, kind, stage), and those to come as (arrival, urgency)."""
        policy, pace = self.policy, self.pace
        ready, coming = [], []
        for stage in self.stages:
            forwards, inputs, weights, replays = self.done[stage]
            if forwards < self.micro_batches:
                arrival, urgency = self.forward_arrival[stage][forwards], policy.forward[stage] + forwards * pace
                if arrival <= now:
                    ready.append((urgency, F, stage))
                elif arrival < _NEVER:
                    coming.append((arrival, urgency))
            if inputs < forwards:
                arrival, urgency = self.gradient_arrival[stage][inputs], policy.backward_input[stage] + inputs * pace
                if self.fires_ahead[stage] and replays <= inputs:
                    ready.append((urgency, R, stage))
                elif arrival <= now:
                    ready.append((urgency, I, stage))
                elif arrival < _NEVER:
                    coming.append((arrival, urgency))
            if weights < inputs:
                ready.append((policy.backward_weight[stage] + weights * pace, W, stage))
        return ready, coming

    def start(self, kind: int, stage: int, now: float) -> int:
        """Run a step and return its micro-batch."""
        micro_batch = self.done[stage][kind]
        self.free_at = now + self.times[kind][stage]
        self.row.append(self.problem.step(kind, stage, micro_batch))
        self._account(kind, stage, 1)
        return micro_batch

    def _account(self, kind: int, stage: int, sign: int) -> None:
        """Count a step as run (sign 1), or take it back (-1)."""
        micro_batch = self.done[stage][kind] - (sign < 0)
        self.done[stage][kind] += sign
        if kind == F:
            change = self.taken[stage]
        elif kind == R:
            change = self.replayed[stage]
        elif kind == I:
            change = self.pending[stage] - self.taken[stage]
            change -= self.replayed[stage] if self.fires_ahead[stage] else 0.0
        else:
            change = -self.pending[stage]
        self.level += sign * change
        self.held[micro_batch] += sign * change

    def _may_start(self, kind: int, stage: int) -> bool:
        if self.limit == _NEVER:
            return True
        if kind == I:
            return self.fires_ahead[stage] or self.level + self.replayed[stage] <= self.limit
        if self.level + (self.taken if kind == F else self.replayed)[stage] > self.limit:
            return False
        self._account(kind, stage, 1)
        safe = self.is_safe()
        self._account(kind, stage, -1)
        return safe

    def is_safe(self) -> bool:
        """Whether the micro-batches in flight can be finished one after the other (rule 4)."""
        free = self.limit - self.level
        oldest = min(self.done[stage][W] for stage in self.stages)
        newest = max(self.done[stage][F] for stage in self.stages)
        for micro_batch in range(oldest, max(newest, min(oldest + 1, self.micro_batches))):
            if free >= self.most:
                return True
            if self._need(micro_batch) > free:
                return False
            free += self.held[micro_batch]
        return True

    def _need(self, micro_batch: int) -> float:
        """What a micro-batch takes from now to its end, at most.

        First all its forwards, then stage by stage, from the last one: its replay, dx, and dw, which lets go of it.
        """
        taken = sum(self.taken[stage] for stage in self.stages if micro_batch >= self.done[stage][F])
        most = taken
        for stage in reversed(self.stages):
            _, inputs, weights, replays = self.done[stage]
            if micro_batch < weights:
                continue
            if micro_batch < inputs:
                taken -= self.pending[stage]
                continue
            if micro_batch >= (replays if self.fires_ahead[stage] else inputs):
                taken += self.replayed[stage]
                most = max(most, taken)
            taken -= self.taken[stage] + self.replayed[stage]
        return most


def lines(problem: Problem, lead: float, weight_lag: float) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Where urgency starts if every step ran as early as the pipeline allows.

    Args:
        problem: gives the times.
        lead: time between the end of a micro-batch's forwards and its first backward; less puts backwards first.
        weight_lag: how much later than its dx a dw is urgent.
    """
    forward, now = [], 0.0
    for time, delay in zip(problem.forward, problem.forward_delay):
        forward.append(now)
        now += time + delay
    now += lead
    inputs = [0.0] * problem.stages
    for stage in reversed(range(problem.stages)):
        inputs[stage] = now
        now += problem.backward_input[stage] + problem.gradient_delay[stage]
    return forward, inputs, [time + weight_lag for time in inputs]
