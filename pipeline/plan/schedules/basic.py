"""Schedules with a full backward: GPipe, 1F1B, interleaved 1F1B, looped breadth-first."""

from __future__ import annotations

from pipeline.plan.action import Action, backward, forward
from pipeline.plan.placement import loop
from pipeline.plan.plan import Plan
from pipeline.plan.schedules.row import check_sizes


def gpipe(ranks: int, micro_batches: int) -> Plan:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, figure 2c)."""
    check_sizes(ranks, micro_batches)
    rows = tuple(
        (*(forward(rank, k) for k in range(micro_batches)), *(backward(rank, k) for k in range(micro_batches)))
        for rank in range(ranks)
    )
    return Plan(rows, loop(ranks), micro_batches, "gpipe")


def one_f_one_b(ranks: int, micro_batches: int) -> Plan:
    """Warm up, then one forward and one backward in turn (Narayanan et al. 2021, figure 4 above)."""
    check_sizes(ranks, micro_batches)
    rows = []
    for rank in range(ranks):
        forwards = [forward(rank, k) for k in range(micro_batches)]
        backwards = [backward(rank, k) for k in range(micro_batches)]
        rows.append(_warm_up_then_alternate(forwards, backwards, warm_up=ranks - 1 - rank))
    return Plan(tuple(rows), loop(ranks), micro_batches, "1f1b")


def interleaved_one_f_one_b(ranks: int, micro_batches: int, virtual: int = 2) -> Plan:
    """1F1B over `virtual` stages per rank (Narayanan et al. 2021, section 2.2 and figure 4 below).

    Micro-batches go in groups of `ranks`: a group passes through the rank's first stage, then through its second, and
    so on. The figure needs whole groups. If the last one is not, the plan is that for whole groups without the
    micro-batches that are not there: taking some out of a plan never makes the others wait longer.
    """
    check_sizes(ranks, micro_batches, virtual)
    groups = [range(start, start + ranks) for start in range(0, micro_batches, ranks)]
    rows = []
    for rank in range(ranks):
        stages = [rank + turn * ranks for turn in range(virtual)]
        forwards = [forward(stage, k) for group in groups for stage in stages for k in group]
        backwards = [backward(stage, k) for group in groups for stage in reversed(stages) for k in group]
        warm_up = (virtual - 1) * ranks + 2 * (ranks - 1 - rank)
        row = _warm_up_then_alternate(forwards, backwards, warm_up)
        rows.append(tuple(action for action in row if action.micro_batch < micro_batches))
    return Plan(tuple(rows), loop(ranks, virtual), micro_batches, "interleaved")


def looped_bfs(ranks: int, micro_batches: int, virtual: int = 2) -> Plan:
    """Breadth first: all micro-batches through a rank's stage before its next one (Lamy-Poirier 2023, figure 4d)."""
    check_sizes(ranks, micro_batches, virtual)
    rows = []
    for rank in range(ranks):
        stages = [rank + turn * ranks for turn in range(virtual)]
        forwards = [forward(stage, k) for stage in stages for k in range(micro_batches)]
        backwards = [backward(stage, k) for stage in reversed(stages) for k in range(micro_batches)]
        rows.append((*forwards, *backwards))
    return Plan(tuple(rows), loop(ranks, virtual), micro_batches, "bfs")


def _warm_up_then_alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    row = forwards[:warm_up]
    for ahead, back in zip(forwards[warm_up:], backwards):
        row += [ahead, back]
    return tuple(row + backwards[len(forwards) - warm_up :])
