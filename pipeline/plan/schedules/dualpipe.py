"""DualPipeV (DeepSeek, DualPipe cut in half): a V of two stages per rank that overlaps forwards with backwards."""

from __future__ import annotations

from pipeline.plan.placement import v_shape
from pipeline.plan.plan import Plan, Row
from pipeline.plan.schedules.row import RowWriter, check_sizes


def dualpipe_v(ranks: int, micro_batches: int) -> Plan:
    """DualPipeV: in the steady state a forward of one micro-batch and a backward of another run as one overlapped pair.

    Source: the eight steps and the figure that DeepSeek published with DualPipe ("DualPipeV", 2025), itself half of the
    bidirectional schedule of the DeepSeek-V3 report (2024), figure 5.
    """
    check_sizes(ranks, micro_batches)
    rows = tuple(_row(rank, ranks, micro_batches) for rank in range(ranks))
    return Plan(rows, v_shape(ranks), micro_batches, "dualpipe-v")


def _row(rank: int, ranks: int, micro_batches: int) -> Row:
    """The loop counts are the figure's. `down` is the stage on the way down the V, `up` the one on the way back."""
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank
    drawn = max(micro_batches, 2 * ranks)
    row = RowWriter(micro_batches)

    # 1. Forwards on the way down.
    for _ in range(2 * after):
        row.forward(down)

    # 2. Forwards both ways.
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)

    # 3. The first backwards on the way up, split.
    for _ in range(after):
        row.backward_input(up)
        row.backward_weight()
        row.forward(up)

    # 4. The steady state: both forwards overlap with the other stage's backward.
    for turn in range(drawn - 2 * ranks + rank + 1):
        if turn == 0 and after == 0:
            # The last rank turns the V. Apart, its forward need not wait for the gradient that its backward waits for.
            row.forward(down)
            row.backward(up)
        else:
            row.forward_and_backward(down, up)
        row.forward_and_backward(up, down)

    # 5. No forwards are left on the way down.
    for _ in range(after):
        row.backward(up)
        row.forward_and_backward(up, down)

    # 6. Backwards both ways; the second half of them split.
    for turn in range(2 * (rank + 1)):
        stage = down if turn % 2 else up
        if turn <= rank:
            row.backward(stage)
        else:
            row.backward_input(stage)

    # 7. Backwards on the way down, with W between them.
    for _ in range(after):
        row.backward_weight()
        row.backward_input(down)

    # 8. The W that are left.
    for _ in range(rank + 1):
        row.backward_weight()
    return row.row()
