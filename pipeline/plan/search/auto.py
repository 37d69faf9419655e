"""`auto`: a plan for given costs and memory limits, never worse than the best named schedule.

1. The named schedules that have the right number of stages are simulated, with each recompute mode that is allowed.
2. List scheduling makes candidates: first a grid of policies, then the best ones are changed at random.
3. The best few of both are bettered by local search.
4. The winner is validated and simulated like any other plan, and the best named schedule wins a draw.

Everything is a function of the arguments: the same call gives the same plan.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Callable, NamedTuple

from pipeline.plan.action import PlanError
from pipeline.plan.costs import Costs, Memory
from pipeline.plan.placement import Placement, loop, mapping, v_shape
from pipeline.plan.plan import Plan
from pipeline.plan.search.list_scheduling import Policy, lines, schedule
from pipeline.plan.search.local_search import improve
from pipeline.plan.search.named import Candidate, named_candidates
from pipeline.plan.search.problem import TOLERANCE, Problem, Rows
from pipeline.plan.simulate import Simulation, simulate
from pipeline.plan.validate import faults

# How many steps the search may schedule or time, and how many candidates, for effort 1. Some seconds on one core.
_STEPS = 300_000
_TRIES = 1500
_SHARE_OF_POLICIES = 0.6
_FINALISTS = 4


@dataclass(frozen=True)
class SearchResult:
    """What the search found.

    Args:
        plan: the best plan.
        simulation: how it runs.
        best_named: the best named schedule within the limit; None if there is none.
        lower_bound: no plan with this placement is faster, however much memory it has.
    """

    plan: Plan
    simulation: Simulation
    best_named: Candidate | None
    lower_bound: float


class _Found(NamedTuple):
    makespan: float
    problem: Problem
    rows: Rows
    checkpointed: tuple[bool, ...]
    policy: Policy | None


def auto(
    ranks: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory: Memory | None = None,
    memory_limit: float | Sequence[float] | None = None,
    stages: int | None = None,
    recompute: Sequence[str] = ("none",),
    effort: float = 1.0,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> SearchResult:
    """Search a plan.

    Args:
        ranks: how many ranks.
        micro_batches: how many micro-batches.
        costs: time of each stage's actions; None: one unit each for F, I and W.
        memory: what chunks hold; None: one unit for each chunk.
        memory_limit: most memory of a rank, one number or one per rank; None: no limit.
        stages: how many stages the costs are for; None: one per rank. If there are more than ranks, the search also
            chooses which rank holds which.
        recompute: what the plan may do with a chunk: of "none", "lazy", "prefire". The search chooses by stage.
        effort: how long to search; the time grows in proportion, 1 takes some seconds.
        seed: of the random changes.
        progress: called with the share of the search that is done.

    Raises:
        PlanError: sizes or limits are out of range, or no plan was found within the limit.
    """
    costs, memory, stages = costs or Costs(), memory or Memory(), ranks if stages is None else stages
    limits = _check(ranks, micro_batches, stages, memory_limit, recompute)
    named = named_candidates(ranks, micro_batches, stages, costs, memory, recompute)
    fitting = [candidate for candidate in named if candidate.fits(limits)]
    best_named = min(fitting, key=lambda candidate: candidate.simulation.makespan, default=None)
    lazily = "prefire" not in recompute
    placements = _placements(ranks, stages, costs, micro_batches)
    problems = [Problem(placement, micro_batches, costs, memory, limits, lazily) for placement in placements]
    search = _Search(problems, recompute, effort, random.Random(seed), progress)
    search.try_named(fitting)
    search.try_policies()
    search.try_local()
    return _result(search, best_named, named, limits)


def _check(
    ranks: int, micro_batches: int, stages: int, limit: float | Sequence[float] | None, recompute: Sequence[str]
) -> list[float]:
    """The limit of each rank."""
    for what, value, least in (("ranks", ranks, 1), ("micro_batches", micro_batches, 1), ("stages", stages, ranks)):
        if value < least:
            raise PlanError(f"expected at least {least} for {what}, saw {value}")
    if not recompute or not set(recompute) <= {"none", "lazy", "prefire"}:
        raise PlanError(f"expected some of none, lazy, prefire for recompute, saw {recompute!r}")
    if limit is None:
        return [float("inf")] * ranks
    limits = [float(limit)] * ranks if isinstance(limit, (int, float)) else list(limit)
    if len(limits) != ranks or any(not one > 0 for one in limits):
        raise PlanError(f"expected a memory limit above 0, one number or {ranks}, saw {limit}")
    return limits


def _placements(ranks: int, stages: int, costs: Costs, micro_batches: int) -> list[Placement]:
    """The usual placements, and one that gives every rank about the same work."""
    virtual, rest = divmod(stages, ranks)
    if stages == ranks:
        return [loop(ranks)]
    usual = [] if rest else [loop(ranks, virtual)]
    if stages == 2 * ranks:
        usual.append(v_shape(ranks))
    probe = Problem(mapping([stage % ranks for stage in range(stages)]), micro_batches, costs, Memory(), ())
    each = [sum(of) for of in zip(probe.forward, probe.backward_input, probe.backward_weight)]
    rank_of, load, room = [0] * stages, [0.0] * ranks, [-(-stages // ranks)] * ranks
    for stage in sorted(range(stages), key=lambda stage: -each[stage]):
        rank = min((rank for rank in range(ranks) if room[rank]), key=lambda rank: load[rank])
        rank_of[stage], load[rank], room[rank] = rank, load[rank] + each[stage], room[rank] - 1
    balanced = Placement(tuple(rank_of), ranks)
    return [*usual, balanced] if all(rank in rank_of for rank in range(ranks)) else usual


class _Search:
    """The candidates found so far, and how much of the search is left."""

    def __init__(
        self,
        problems: Sequence[Problem],
        recompute: Sequence[str],
        effort: float,
        generator: random.Random,
        progress: Callable[[float], None],
    ) -> None:
        self.problems, self.generator, self.progress = problems, generator, progress
        self.may_keep, self.may_replay = "none" in recompute, set(recompute) != {"none"}
        self.steps_per_try = 3 * problems[0].stages * problems[0].micro_batches
        self.tries = max(int(effort * min(_STEPS / self.steps_per_try, _TRIES)), 12)
        self.spent = 0
        self.found: list[_Found] = []
        self.bounds = [_lower_bound(problem) for problem in problems]

    @property
    def best(self) -> float:
        """The least makespan found."""
        return min((one.makespan for one in self.found), default=float("inf"))

    @property
    def is_done(self) -> bool:
        """Whether nothing better can be found."""
        return self.best <= min(self.bounds) + TOLERANCE

    def try_named(self, candidates: Sequence[Candidate]) -> None:
        """Take the named schedules in, with their backward split."""
        for candidate in candidates:
            for problem in self.problems:
                if problem.placement == candidate.plan.placement:
                    self._add(problem, *problem.from_plan(candidate.plan), None)

    def try_policies(self) -> None:
        """A grid of policies, then random changes of the best ones."""
        tries = int(self.tries * _SHARE_OF_POLICIES)
        for problem, policy in itertools.islice(self._grid(), tries * 2 // 3):
            self._try_policy(problem, policy)
        while self.spent < tries and not self.is_done:
            with_policy = sorted((one for one in self.found if one.policy), key=lambda one: one.makespan)
            if not with_policy:
                return
            parent = with_policy[min(int(self.generator.expovariate(0.7)), len(with_policy) - 1)]
            self._try_policy(parent.problem, self._changed(parent.problem, parent.policy))

    def try_local(self) -> None:
        """Local search on the best few, the better ones longer."""
        finalists = sorted(self.found, key=lambda one: one.makespan)[:_FINALISTS]
        for index, one in enumerate(finalists):
            if self.is_done:
                break
            rounds = (self.tries - self.spent) // (1 + (len(finalists) - 1 - index) // 2)
            bound = self.bounds[self.problems.index(one.problem)]
            improved = improve(one.problem, one.rows, one.checkpointed, rounds, bound, self.generator)
            self.found.append(one._replace(rows=improved.rows, makespan=improved.makespan))
            self._spend(rounds)
        self.progress(1.0)

    def _spend(self, tries: int) -> None:
        self.spent += tries
        self.progress(min(self.spent / self.tries, 1.0))

    def _try_policy(self, problem: Problem, policy: Policy) -> None:
        if self.is_done:
            return
        self._spend(1)
        rows = schedule(problem, policy)
        if rows is not None:
            self._add(problem, rows, policy.checkpointed, policy)

    def _add(self, problem: Problem, rows: Rows, checkpointed: tuple[bool, ...], policy: Policy | None) -> None:
        timing = problem.timing(rows, problem.step_times(checkpointed))
        if timing is not None:
            self.found.append(_Found(timing.makespan, problem, rows, checkpointed, policy))
            if len(self.found) > 200:
                self.found = sorted(self.found, key=lambda one: one.makespan)[:40]

    def _grid(self) -> Iterator[tuple[Problem, Policy]]:
        leads, lags, patiences = (0.0, 1.0, -0.5, 2.0, 0.5), (float("inf"), 0.0, 1.0, 3.0), (0.0, 0.5)
        for lead, lag, patience in itertools.product(leads, lags, patiences):
            for problem in self.problems:
                pace = max(problem.work) / problem.micro_batches
                depth = sum(problem.forward) + sum(problem.backward_input)
                starts = [tuple(line) for line in lines(problem, lead * depth, lag * pace)]
                for checkpointed in self._checkpointed(problem):
                    yield problem, Policy(*starts, patience, checkpointed, problem.limits)

    def _checkpointed(self, problem: Problem) -> list[tuple[bool, ...]]:
        """Which stages to checkpoint: none, all, those of the first ranks (they hold the most chunks)."""
        if not self.may_replay:
            return [(False,) * problem.stages]
        if not self.may_keep:
            return [(True,) * problem.stages]
        counts = sorted({0, problem.ranks, problem.ranks // 4, problem.ranks // 2, 3 * problem.ranks // 4})
        return [tuple(rank < count for rank in problem.rank_of) for count in counts]

    def _changed(self, problem: Problem, policy: Policy) -> Policy:
        """A policy like another one, with a few things changed at random."""
        draw = self.generator
        pace = max(problem.work) / problem.micro_batches
        size = pace * 10 ** draw.uniform(-1.5, 0.7)

        def shifted(line: Sequence[float], chance: float) -> tuple[float, ...]:
            return tuple(start + draw.gauss(0.0, size) if draw.random() < chance else start for start in line)

        changed = policy
        choice = draw.random()
        chance = draw.choice((0.15, 0.5, 1.0))
        if choice < 0.35:
            changed = changed._replace(forward=shifted(policy.forward, chance))
        elif choice < 0.55:
            changed = changed._replace(backward_input=shifted(policy.backward_input, chance))
        elif choice < 0.85:
            base = [start if start < float("inf") else dx + 2 * pace for start, dx in self._weights(policy)]
            changed = changed._replace(backward_weight=shifted(base, chance))
        else:
            changed = changed._replace(patience=draw.choice((0.0, 0.2, 0.5, 0.8, 1.0)))
        if self.may_keep and self.may_replay and draw.random() < 0.3:
            flipped = draw.randrange(problem.stages)
            kept = tuple(one != (stage == flipped) for stage, one in enumerate(policy.checkpointed))
            changed = changed._replace(checkpointed=kept)
        return changed

    @staticmethod
    def _weights(policy: Policy) -> Iterator[tuple[float, float]]:
        return zip(policy.backward_weight, policy.backward_input)


def _lower_bound(problem: Problem) -> float:
    """The busiest rank cannot start before the forwards ahead of it nor end before the gradients behind it.

    The dw of the rank may run while those gradients do; recompute is left out. So is everything about memory.
    """
    bound = 0.0
    head, heads, tails = 0.0, [], []
    tail = 0.0
    for stage in range(problem.stages):
        heads.append(head)
        head += problem.forward[stage] + problem.forward_delay[stage]
        tail += problem.gradient_delay[stage] if stage else 0.0
        tails.append(tail)
        tail += problem.backward_input[stage]
    for stages, work in zip(problem.stages_of, problem.work):
        weights = problem.micro_batches * sum(problem.backward_weight[stage] for stage in stages)
        behind = tails[min(stages)] + (problem.backward_weight[0] if min(stages) else 0.0)
        bound = max(bound, heads[min(stages)] + work + max(0.0, behind - weights))
    return bound


def _result(
    search: _Search, best_named: Candidate | None, named: Sequence[Candidate], limits: Sequence[float]
) -> SearchResult:
    """The best plan that stands the validator and the simulator."""
    bound = min(search.bounds)
    for one in sorted(search.found, key=lambda one: one.makespan):
        if best_named and one.makespan >= best_named.simulation.makespan - TOLERANCE:
            break
        plan = _merged(one)
        candidate = Candidate(plan, simulate(plan, one.problem.costs, one.problem.memory))
        if not faults(plan) and candidate.fits(limits):
            return SearchResult(plan, candidate.simulation, best_named, bound)
    if best_named:
        return SearchResult(best_named.plan, best_named.simulation, best_named, bound)
    least = min((max(candidate.simulation.peak_memory) for candidate in named), default=None)
    hint = f"the named schedule that needs least takes {least:g}" if least is not None else "no named schedule has them"
    raise PlanError(
        f"expected a memory limit that some plan keeps within, saw {min(limits):g}; {hint}: "
        "give more memory or allow --recompute prefire"
    )


def _merged(one: _Found) -> Plan:
    """The plan of what was found, with the backward whole on each rank where the split brings nothing."""
    whole = [False] * one.problem.ranks
    plan = one.problem.to_plan(one.rows, one.checkpointed, "auto", whole)
    for rank in range(one.problem.ranks):
        whole[rank] = True
        merged = one.problem.to_plan(one.rows, one.checkpointed, "auto", whole)
        if simulate(merged, one.problem.costs, one.problem.memory).makespan <= one.makespan + TOLERANCE:
            plan = merged
        else:
            whole[rank] = False
    return plan
