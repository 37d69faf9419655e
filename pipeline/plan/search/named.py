"""The named schedules as candidates: what the search starts from, and what it must not be worse than."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.plan.action import PlanError
from pipeline.plan.costs import Costs, Memory
from pipeline.plan.passes import insert_recompute
from pipeline.plan.plan import Plan
from pipeline.plan.schedules import SCHEDULES, TAKES_VIRTUAL, make_plan
from pipeline.plan.search.problem import TOLERANCE
from pipeline.plan.simulate import Simulation, simulate


class Candidate(NamedTuple):
    """A plan and how it runs."""

    plan: Plan
    simulation: Simulation

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether every rank keeps within its limit."""
        return all(peak <= limit + TOLERANCE for peak, limit in zip(self.simulation.peak_memory, limits))


def named_plans(ranks: int, micro_batches: int, stages: int) -> Iterator[Plan]:
    """Every named schedule that has this many stages."""
    virtual, rest = divmod(stages, ranks)
    for name in SCHEDULES:
        if rest and name in TAKES_VIRTUAL:
            continue
        try:
            plan = make_plan(name, ranks, micro_batches, virtual if name in TAKES_VIRTUAL else None)
        except PlanError:
            continue  # not for these sizes
        if plan.stages == stages:
            yield plan


def named_candidates(
    ranks: int, micro_batches: int, stages: int, costs: Costs, memory: Memory, recompute: Sequence[str]
) -> list[Candidate]:
    """Every named schedule that has this many stages, with each of the recompute modes."""
    plans = [
        plan if mode == "none" else insert_recompute(plan, mode)
        for plan in named_plans(ranks, micro_batches, stages)
        for mode in recompute
    ]
    return [Candidate(plan, simulate(plan, costs, memory)) for plan in plans]
