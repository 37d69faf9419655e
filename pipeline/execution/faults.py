"""What is told when a rank cannot go on: who, where in its row, and why."""

from __future__ import annotations

from pipeline.plan import Action, Plan

SHOWN_AROUND = 6


class PipelineError(RuntimeError):
    """The job cannot go on.

    Attributes:
        rank: the rank of the plan where the cause is.
        stage: the stage that it was at, None outside of an action.
        action: the action that it was in, as text, None outside of an action.
    """

    def __init__(self, message: str, rank: int, stage: int | None = None, action: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.action = action


class ActionError(PipelineError):
    """An action raised."""

    def __init__(self, plan: Plan, rank: int, position: int, error: BaseException) -> None:
        action = plan.rows[rank][position]
        cause = f"{type(error).__name__}: {error}"
        super().__init__(
            f"{place(plan, rank, position)}: {cause}\n{marked_row(plan, rank, position)}",
            rank,
            action.stage,
            str(action),
        )


def place(plan: Plan, rank: int, position: int | None) -> str:
    """Rank, stage and action in words; position None is between two steps."""
    if position is None:
        return f"rank {rank}, between two steps"
    action = plan.rows[rank][position]
    return f"rank {rank}, stage {action.stage}, action {action} ({position + 1} of {len(plan.rows[rank])})"


def marked_row(plan: Plan, rank: int, position: int | None, around: int = SHOWN_AROUND) -> str:
    """The plan's row around a position, which is marked."""
    if position is None:
        return f"  plan {plan.name}, row {rank}"
    row = plan.rows[rank]
    first, last = max(0, position - around), min(len(row), position + around + 1)
    cells = [_cell(row[index], index == position) for index in range(first, last)]
    before, after = "... " if first else "", " ..." if last < len(row) else ""
    return f"  plan {plan.name}, row {rank}: {before}{' '.join(cells)}{after}"


def _cell(action: Action, marked: bool) -> str:
    return f">>{action}<<" if marked else str(action)
