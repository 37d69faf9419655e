"""Which rank holds which stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.plan.action import PlanError


@dataclass(frozen=True)
class Placement:
    """Stages on ranks. Stage s feeds stage s + 1, wherever that one is.

    Args:
        rank_by_stage: for each stage the rank that holds it.
        ranks: how many ranks there are.
    """

    rank_by_stage: tuple[int, ...]
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.rank_by_stage:
            raise PlanError(f"expected at least one rank and one stage, saw {self.ranks} and {len(self.rank_by_stage)}")
        for stage, rank in enumerate(self.rank_by_stage):
            if not 0 <= rank < self.ranks:
                raise PlanError(
                    f"expected a rank below {self.ranks} for stage {stage}, saw {rank}; check the placement"
                )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_by_stage)

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage."""
        return self.rank_by_stage[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(stage for stage, holder in enumerate(self.rank_by_stage) if holder == rank)

    def crosses(self, stage: int) -> bool:
        """Whether what goes from a stage to the next one leaves the rank (False for the last stage)."""
        return stage + 1 < self.stages and self.rank_by_stage[stage] != self.rank_by_stage[stage + 1]


def loop(ranks: int, virtual: int = 1) -> Placement:
    """Stage s on rank s mod ranks: each rank holds `virtual` stages (Narayanan et al. 2021, section 2.2)."""
    return Placement(tuple(range(ranks)) * virtual, ranks)


def v_shape(ranks: int) -> Placement:
    """Two stages a rank, down and back up: rank i holds stages i and 2 * ranks - 1 - i (Qi et al. 2023, section 6)."""
    return Placement((*range(ranks), *reversed(range(ranks))), ranks)


def mapping(rank_by_stage: Sequence[int]) -> Placement:
    """Any placement, given the rank of each stage."""
    return Placement(tuple(rank_by_stage), max(rank_by_stage, default=-1) + 1)
