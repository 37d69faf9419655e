"""What is told when a rank cannot go on: who, where in its row, and why. One form for every kind of fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.execution.grid import RankGrid
from pipeline.plan import Action, Plan

SHOWN_AROUND = 6


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong.

    Attributes:
        rank: the world rank that it is about.
        message: rank, stage, action, cause, and the plan's row with the place marked.
        stage: the stage that the rank was at, None outside of an action.
        action: the action that it was in, as text, None outside of an action.
    """

    rank: int
    message: str
    stage: int | None = None
    action: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, to send to other ranks."""
        return dataclasses.asdict(self)


class PipelineError(RuntimeError):
    """The job cannot go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ActionError(PipelineError):
    """An action of this rank raised."""


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        plan: which of its plans it runs (a schedule has one for training and one for evaluation).
        position: the action in its row, None outside of the row.
        busy: whether other ranks wait for it.
        doing: what it does outside of the row.
    """

    plan: int = 0
    position: int | None = None
    busy: bool = False
    doing: str = "before its first step"


class Reporter:
    """Describes failures.

    Args:
        plans: the plans that the ranks run, as `Place.plan` numbers them.
        grid: which row a rank has in them.
    """

    def __init__(self, plans: Sequence[Plan], grid: RankGrid) -> None:
        self._plans = plans
        self._grid = grid

    def row_of(self, rank: int) -> int:
        """The row that a rank runs."""
        return self._grid.pipeline_rank(rank)

    def failure(self, rank: int, place: Place, cause: str) -> Failure:
        """What happened to a rank, and where it was."""
        plan, row = self._plans[place.plan], self.row_of(rank)
        line = marked_row(plan, row, place.position)
        if place.position is None:
            return Failure(rank, f"rank {rank}, {place.doing}: {cause}\n{line}")
        action = plan.rows[row][place.position]
        where = f"rank {rank}, stage {action.stage}, action {action} ({place.position + 1} of {len(plan.rows[row])})"
        return Failure(rank, f"{where}: {cause}\n{line}", action.stage, str(action))


def marked_row(plan: Plan, row: int, position: int | None, around: int = SHOWN_AROUND) -> str:
    """The plan's row, or what is around the position that is marked."""
    actions = plan.rows[row]
    middle = 0 if position is None else position
    first, last = max(0, middle - around), min(len(actions), middle + around + 1)
    cells = [_cell(actions[index], index == position) for index in range(first, last)]
    before, after = "... " if first else "", " ..." if last < len(actions) else ""
    return f"  row {row} of plan {plan.name}: {before}{' '.join(cells)}{after}"


def _cell(action: Action, marked: bool) -> str:
    return f">>{action}<<" if marked else str(action)
