"""Schedules over a V of two stages per rank, with a split backward: ZB-V (Qi et al. 2023)."""

from __future__ import annotations

from pipeline.plan.action import Kind
from pipeline.plan.placement import v_shape
from pipeline.plan.plan import Plan, Row
from pipeline.plan.schedules.row import RowWriter, check_sizes


def zb_v(ranks: int, micro_batches: int) -> Plan:
    """No rank waits between its first and last action if F, I and W take equally long; 2 * ranks chunks on every rank.

    Source: Qi et al. 2023, section 6, figure 8. Drawn for at least 2 * ranks - 1 micro-batches.
    """
    check_sizes(ranks, micro_batches)
    rows = tuple(_zb_v_row(rank, ranks, micro_batches) for rank in range(ranks))
    return Plan(rows, v_shape(ranks), micro_batches, "zb-v")


def _zb_v_row(rank: int, ranks: int, micro_batches: int) -> Row:
    """Left to right in the figure. `down` is the stage on the way down the V, `up` the one on the way back."""
    down, up = rank, 2 * ranks - 1 - rank
    drawn = max(micro_batches, 2 * ranks - 1)
    row = RowWriter(micro_batches)
    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        row.backward_input(up)
        row.backward_weight()
    while row.done(Kind.F, up) < drawn:
        if row.done(Kind.F, down) < drawn:
            row.forward(down)
        row.backward_input(down)
        row.backward_weight()
        row.forward(up)
        row.backward_input(up)
        row.backward_weight()
    for _ in range(rank):
        row.backward_input(down)
        row.backward_input(up)
    for _ in range(ranks - rank):
        row.backward_input(down)
        row.backward_weight()
    while row.pending:
        row.backward_weight()
    return row.row()
