"""A plan: every rank's list of actions, with the placement of the stages. A value; passes make new ones from it."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import re
from dataclasses import dataclass
from typing import Any

from pipeline.plan.action import COMMUNICATION, Action, PlanError
from pipeline.plan.placement import Placement

# torch.distributed.pipelining writes these for sharded parameters. They order nothing between stages.
_TORCH_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*", re.ASCII)

Row = tuple[Action, ...]


@dataclass(frozen=True)
class Plan:
    """Every rank's list of actions.

    Args:
        rows: for each rank its actions, in the order in which it runs them.
        placement: which rank holds which stage.
        micro_batches: how many micro-batches a step has.
        name: how the plan was made, for people.
    """

    rows: tuple[Row, ...]
    placement: Placement
    micro_batches: int
    name: str = ""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.placement.stages

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are written out. Without them they follow from the order of the stages."""
        return any(action.kind in COMMUNICATION for row in self.rows for action in row)

    def replace(self, **changes: Any) -> Plan:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)

    def to_csv(self) -> str:
        """A row per rank, a cell per action, as torch.distributed.pipelining writes it."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    @staticmethod
    def from_csv(
        text: str, placement: Placement | None = None, micro_batches: int | None = None, name: str = "csv"
    ) -> Plan:
        """Read a plan from its CSV form.

        Empty cells (torch writes them for idle time) and torch's actions for sharded parameters are left out.

        Args:
            text: a row per rank, a cell per action.
            placement: which rank holds which stage; None reads it from the rows.
            micro_batches: how many micro-batches a step has; None takes the largest in the text, plus one.
            name: the name of the plan.

        Raises:
            PlanError: cells are no actions (each is told with row and cell, from 0), or the placement cannot be read.
        """
        wrong: list[str] = []
        rows = tuple(_parse_row(rank, cells, wrong) for rank, cells in enumerate(csv.reader(io.StringIO(text))))
        if wrong:
            raise PlanError("\n".join(wrong))
        parts = [part for row in rows for action in row for part in action.parts]
        if placement is None:
            _check_numbers(parts, "stage", [part.stage for part in parts])
            placement = _read_placement(rows)
        if micro_batches is None:
            _check_numbers(parts, "micro-batch", [part.micro_batch for part in parts])
            micro_batches = 1 + max(part.micro_batch for part in parts)
        return Plan(rows, placement, micro_batches, name)

    def digest(self) -> str:
        """A fingerprint of what is executed (not of the name), to compare between ranks."""
        content = f"{self.placement.rank_by_stage};{self.ranks};{self.micro_batches}\n{self.to_csv()}"
        return hashlib.sha256(content.encode()).hexdigest()


def _parse_row(rank: int, cells: list[str], wrong: list[str]) -> Row:
    actions = []
    for position, cell in enumerate(cells):
        cell = cell.strip()
        if not cell or _TORCH_SHARDING.fullmatch(cell):
            continue
        try:
            actions.append(Action.parse(cell))
        except PlanError as error:
            wrong.append(f"row {rank}, cell {position}: {error}")
    return tuple(actions)


def _check_numbers(parts: list[Action], what: str, numbers: list[int]) -> None:
    """A number beyond the count of actions is a slip of the pen: there are not enough actions for those below it."""
    if max(numbers, default=0) > len(parts):
        worst = parts[numbers.index(max(numbers))]
        raise PlanError(f"expected every {what} up to the largest, saw {worst} among only {len(parts)} actions")


def _read_placement(rows: tuple[Row, ...]) -> Placement:
    """A stage belongs to the first row that has an action of it. (If others have too, the validator says so.)"""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.parts:
                rank_of.setdefault(part.stage, rank)
    if not rank_of:
        raise PlanError("expected a row per rank with an action per cell, saw no action at all; check the file")
    missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
    if missing:
        raise PlanError(
            f"expected actions of every stage up to {max(rank_of)}, saw none of {missing}; check the stages"
        )
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))), len(rows))
