"""Local search on the rows of one candidate: move steps that are on the critical path.

A step that starts the moment the step before it on its rank ends, and waits for nothing else, is held up by that one.
On the critical path (the chain of such waits that ends with the last step) only moving one of the two can shorten the
whole (van Laarhoven, Aarts, Lenstra 1992, for job shops). A move is kept if the result fits in memory and is not longer
than the best by more than a tolerance that falls to zero (threshold accepting, Dueck and Scheuer 1990).
"""

from __future__ import annotations

import random
from typing import NamedTuple

from pipeline.plan.search.problem import TOLERANCE, Problem, Rows, Timing

_LONGEST_MOVE = 8
_FIRST_TOLERANCE = 0.004


class Improved(NamedTuple):
    """The best rows found and their makespan."""

    rows: Rows
    makespan: float


def improve(
    problem: Problem,
    rows: Rows,
    checkpointed: tuple[bool, ...],
    rounds: int,
    bound: float,
    generator: random.Random,
) -> Improved:
    """Try `rounds` moves, fewer if the makespan comes down to `bound`. The rows given are left as they are."""
    times = problem.step_times(checkpointed)
    rows = [list(row) for row in rows]
    timing = problem.timing(rows, times)
    if timing is None:
        raise AssertionError("expected rows that run to their end")
    best = Improved([list(row) for row in rows], timing.makespan)
    pairs = _critical_pairs(problem, rows, timing)
    for turn in range(rounds):
        if best.makespan <= bound + TOLERANCE or not pairs:
            break
        rank, position = generator.choice(pairs)
        moved = _moved(problem, rows[rank], position, generator)
        if moved is None or not problem.fits(rank, moved, checkpointed):
            continue
        before, rows[rank] = rows[rank], moved
        changed = problem.timing(rows, times)
        allowed = best.makespan * (1.0 + _FIRST_TOLERANCE * max(0.0, 1.0 - turn / (0.8 * rounds)))
        if changed is None or changed.makespan > max(allowed, best.makespan + TOLERANCE):
            rows[rank] = before
            continue
        timing = changed
        pairs = _critical_pairs(problem, rows, timing)
        if timing.makespan < best.makespan - TOLERANCE:
            best = Improved([list(row) for row in rows], timing.makespan)
    return best


def _critical_pairs(problem: Problem, rows: Rows, timing: Timing) -> list[tuple[int, int]]:
    """(rank, position) of the critical steps that are held up by the step before them in their row."""
    place = {step: (rank, position) for rank, row in enumerate(rows) for position, step in enumerate(row)}
    step = max((row[-1] for row in rows if row), key=lambda last: timing.end[last])
    pairs = []
    while True:
        rank, position = place[step]
        start = timing.start[step]
        if position and timing.end[rows[rank][position - 1]] >= start - TOLERANCE:
            pairs.append((rank, position))
            step = rows[rank][position - 1]
        elif problem.sources[step] >= 0:
            step = problem.sources[step]
        else:
            return pairs


def _moved(problem: Problem, row: list[int], position: int, generator: random.Random) -> list[int] | None:
    """The row with the step at `position` moved forward, or the one before it moved back; None if that cannot be."""
    longest = 1 if generator.random() < 0.4 else generator.randint(2, _LONGEST_MOVE)
    if generator.random() < 0.5:
        mover, step, target = position, row[position], position
        while target > 0 and position - target < longest and _may_swap(problem, row[target - 1], step):
            target -= 1
    else:
        mover, step, target = position - 1, row[position - 1], position - 1
        while target + 1 < len(row) and target - mover < longest and _may_swap(problem, step, row[target + 1]):
            target += 1
    if target == mover:
        return None
    moved = row[:mover] + row[mover + 1 :]
    moved.insert(target, step)
    return moved


def _may_swap(problem: Problem, first: int, second: int) -> bool:
    """Whether two neighbours may change places: not if they are of one chunk, nor if they are alike of one stage."""
    first_kind, first_stage, first_micro_batch = problem.parts(first)
    kind, stage, micro_batch = problem.parts(second)
    return stage != first_stage or (micro_batch != first_micro_batch and kind != first_kind)
