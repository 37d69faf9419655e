"""The cases of the matrix: every combination of its dimensions, and the few that cover every pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.plan import Kind, Plan, insert_recompute, make_plan, merge_backward, split_backward
from pipeline.plan.schedules import SCHEDULES, TAKES_VIRTUAL

BLOCKS_PER_STAGE = 2

RANKS = (2, 3, 4)
QUICK_RANKS = (2, 4)
VIRTUAL = (2, 3)
"""Stages per rank, for the schedules that leave the choice."""
RECOMPUTE = {
    "none": None,
    "lazy": {"mode": "lazy"},
    "prefire": {"mode": "prefire"},
    "ahead": {"mode": "prefire", "lead": 2},
    "last": {"mode": "prefire", "last_blocks": 1},
}
"""How blocks are replayed: not at all, by the backward, before it, one action earlier, only the last one before it."""
EXCLUSION = ("none", "region", "chain")
"""What a replay skips: nothing, one region, or two in a row, the first of which does not keep its output."""
SPLIT = ("whole", "split")
MODELS = ("mlp", "transformer", "experts")


class Case(NamedTuple):
    """One cell of the matrix; each field is one of the values above."""

    schedule: str
    ranks: int
    virtual: int
    recompute: str
    exclusion: str
    split: str
    model: str

    @property
    def name(self) -> str:
        """The case in one word, which `parse` reads."""
        return "/".join(
            (
                self.schedule,
                f"p{self.ranks}",
                f"v{self.virtual}",
                self.recompute,
                self.exclusion,
                self.split,
                self.model,
            )
        )

    @staticmethod
    def parse(name: str) -> Case:
        """Read a case from its name."""
        schedule, ranks, virtual, *rest = name.split("/")
        return Case(schedule, int(ranks[1:]), int(virtual[1:]), *rest)

    @property
    def micro_batches(self) -> int:
        """Enough for every schedule to reach its steady state."""
        return 2 * self.ranks

    def plan(self) -> Plan:
        """The plan that the case runs."""
        virtual = self.virtual if self.schedule in TAKES_VIRTUAL else None
        plan = make_plan(self.schedule, self.ranks, self.micro_batches, virtual)
        is_split = any(part.kind is Kind.I for row in plan.rows for action in row for part in action.parts)
        if self.split == "split":
            plan = split_backward(plan)
        elif is_split:
            plan = merge_backward(plan)
        options = RECOMPUTE[self.recompute]
        return plan if options is None else insert_recompute(plan, **options)


def all_cases(ranks: Sequence[int] = RANKS) -> list[Case]:
    """Every combination that means something: without recompute there is nothing to exclude."""
    return list(_combinations(ranks))


def _combinations(ranks: Sequence[int]) -> Iterator[Case]:
    modes = [pair for pair in itertools.product(RECOMPUTE, EXCLUSION) if pair[0] != "none" or pair[1] == "none"]
    for rank_count, schedule in itertools.product(ranks, SCHEDULES):
        own = make_plan(schedule, rank_count, 2 * rank_count).stages // rank_count
        for virtual in VIRTUAL if schedule in TAKES_VIRTUAL else (own,):
            for (recompute, exclusion), split, model in itertools.product(modes, SPLIT, MODELS):
                yield Case(schedule, rank_count, virtual, recompute, exclusion, split, model)


def full_cases() -> list[Case]:
    """Cases that hold every triple of values that any case holds."""
    return _cover(all_cases(), [], 3)


def quick_cases() -> list[Case]:
    """Few cases that hold every pair of values that any case holds.

    In front of them comes, for each schedule at the largest number of ranks, the split and pre-fired backward with an
    excluded region.
    """
    candidates = all_cases(QUICK_RANKS)
    models = itertools.cycle(MODELS)
    wanted = ("prefire", "region", "split")
    chosen = []
    for schedule in SCHEDULES:
        model = next(models)
        chosen.append(
            next(
                case
                for case in candidates
                if case.schedule == schedule
                and case.ranks == max(QUICK_RANKS)
                and (case.recompute, case.exclusion, case.split) == wanted
                and case.model == model
            )
        )
    return _cover(candidates, chosen, 2)


def _cover(candidates: Sequence[Case], chosen: list[Case], size: int) -> list[Case]:
    """Add the candidate with the most groups of `size` values not yet seen, until all groups are seen."""
    groups_of = {case: frozenset(itertools.combinations(enumerate(case), size)) for case in candidates}
    missing = frozenset().union(*groups_of.values()) - frozenset().union(*(groups_of[case] for case in chosen))
    while missing:
        best = max(candidates, key=lambda case: len(groups_of[case] & missing))
        chosen = [*chosen, best]
        missing -= groups_of[best]
    return chosen
