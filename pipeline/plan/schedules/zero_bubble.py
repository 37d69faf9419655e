"""ZB-H1 and ZB-H2: one stage per rank, the backward split (Qi et al. 2023, Zero Bubble Pipeline Parallelism)."""

from __future__ import annotations

from pipeline.plan.action import Kind
from pipeline.plan.placement import loop
from pipeline.plan.plan import Plan, Row
from pipeline.plan.schedules.row import RowWriter, check_sizes


def zb_h1(ranks: int, micro_batches: int) -> Plan:
    """1F1B whose W are put off to fill the end: every rank holds what 1F1B's first rank holds, the bubble is a third.

    Source: Qi et al. 2023, section 2.1, figure 2.
    """
    check_sizes(ranks, micro_batches)
    rows = tuple(_row(rank, micro_batches, warm_up=ranks - rank, put_off=rank) for rank in range(ranks))
    return Plan(rows, loop(ranks), micro_batches, "zb-h1")


def zb_h2(ranks: int, micro_batches: int) -> Plan:
    """Twice the warm-up, so that no rank waits between its first and last action; each holds 2 * ranks - 1 chunks.

    Source: Qi et al. 2023, section 2.2, figure 3.
    """
    check_sizes(ranks, micro_batches)
    rows = tuple(_row(rank, micro_batches, warm_up=2 * (ranks - rank) - 1, put_off=2 * rank) for rank in range(ranks))
    return Plan(rows, loop(ranks), micro_batches, "zb-h2")


def _row(rank: int, micro_batches: int, warm_up: int, put_off: int) -> Row:
    """`warm_up` forwards before the first I; then I, W, F in turn, with `put_off` W behind."""
    row = RowWriter(micro_batches)
    for _ in range(min(warm_up, micro_batches)):
        row.forward(rank)
    while row.done(Kind.B, rank) < micro_batches:
        row.backward_input(rank)
        if row.pending > put_off or row.done(Kind.F, rank) == micro_batches:
            row.backward_weight()
        if row.done(Kind.F, rank) < micro_batches:
            row.forward(rank)
    while row.pending:
        row.backward_weight()
    return row.row()
