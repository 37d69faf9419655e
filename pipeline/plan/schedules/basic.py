"""Schedules with a full backward: GPipe, 1F1B."""

from __future__ import annotations

from pipeline.plan.action import PlanError, backward, forward
from pipeline.plan.placement import loop
from pipeline.plan.plan import Plan


def check_sizes(ranks: int, micro_batches: int, virtual: int = 1) -> None:
    """Every schedule needs at least one rank, one micro-batch and one stage per rank."""
    for what, value in (("ranks", ranks), ("micro_batches", micro_batches), ("virtual", virtual)):
        if value < 1:
            raise PlanError(f"expected at least 1 for {what}, saw {value}")


def gpipe(ranks: int, micro_batches: int) -> Plan:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, figure 2c)."""
    check_sizes(ranks, micro_batches)
    rows = tuple(
        (*(forward(rank, k) for k in range(micro_batches)), *(backward(rank, k) for k in range(micro_batches)))
        for rank in range(ranks)
    )
    return Plan(rows, loop(ranks), micro_batches, "gpipe")


def one_f_one_b(ranks: int, micro_batches: int) -> Plan:
    """Warm up, then one forward and one backward in turn (Narayanan et al. 2019, PipeDream, figure 8, with a flush)."""
    check_sizes(ranks, micro_batches)
    rows = []
    for rank in range(ranks):
        warm_up = min(micro_batches, ranks - 1 - rank)
        row = [forward(rank, k) for k in range(warm_up)]
        for k in range(micro_batches - warm_up):
            row += [forward(rank, warm_up + k), backward(rank, k)]
        row += [backward(rank, k) for k in range(micro_batches - warm_up, micro_batches)]
        rows.append(tuple(row))
    return Plan(tuple(rows), loop(ranks), micro_batches, "1f1b")
