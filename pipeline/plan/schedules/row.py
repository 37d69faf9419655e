"""Writing one rank's row step by step, so that a schedule's loops read like its figure."""

from __future__ import annotations

from collections import Counter, deque

from pipeline.plan.action import Action, Kind, PlanError
from pipeline.plan.plan import Row


def check_sizes(ranks: int, micro_batches: int, virtual: int = 1) -> None:
    """Every schedule needs at least one rank, one micro-batch and one stage per rank."""
    for what, value in (("ranks", ranks), ("micro_batches", micro_batches), ("virtual", virtual)):
        if value < 1:
            raise PlanError(f"expected at least 1 for {what}, saw {value}")


class RowWriter:
    """A row in the making. Each verb takes the next micro-batch of its stage.

    What lies beyond the last micro-batch is left out: the figures of the V schedules are drawn for many micro-batches,
    and a plan for fewer is the same one without the others.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._count: Counter[tuple[Kind, int]] = Counter()
        self._pending: deque[tuple[int, int]] = deque()
        self._row: list[Action] = []

    def done(self, kind: Kind, stage: int) -> int:
        """How many micro-batches of a stage have had this kind of action."""
        return self._count[kind, stage]

    def forward(self, stage: int) -> None:
        """F of the next micro-batch."""
        self._append([self._next(Kind.F, stage)])

    def backward(self, stage: int) -> None:
        """B of the next micro-batch."""
        self._append([self._next(Kind.B, stage)])

    def backward_input(self, stage: int) -> None:
        """I of the next micro-batch; its W is pending from now on."""
        action = self._next(Kind.B, stage)._replace(kind=Kind.I)
        self._pending.append((stage, action.micro_batch))
        self._append([action])

    def backward_weight(self) -> None:
        """W that has been pending longest."""
        stage, micro_batch = self._pending.popleft()
        self._append([Action(stage, Kind.W, micro_batch)])

    def backward_weight_of(self, stage: int) -> None:
        """W that has been pending longest for this stage."""
        chunk = next(chunk for chunk in self._pending if chunk[0] == stage)
        self._pending.remove(chunk)
        self._append([Action(stage, Kind.W, chunk[1])])

    def forward_and_backward(self, forward_stage: int, backward_stage: int) -> None:
        """F and B of the next micro-batches as one overlapped pair."""
        self._append([self._next(Kind.F, forward_stage), self._next(Kind.B, backward_stage)])

    @property
    def pending(self) -> int:
        """How many W are pending."""
        return len(self._pending)

    def row(self) -> Row:
        """What has been written."""
        return tuple(self._row)

    def _next(self, kind: Kind, stage: int) -> Action:
        micro_batch = self._count[kind, stage]
        self._count[kind, stage] += 1
        return Action(stage, kind, micro_batch)

    def _append(self, parts: list[Action]) -> None:
        wanted = [part for part in parts if part.micro_batch < self._micro_batches]
        if len(wanted) == 2:
            self._row.append(Action.overlap(*wanted))
        else:
            self._row += wanted
