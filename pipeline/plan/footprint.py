"""Memory of a rank along its row.

What a rank holds depends on the order of its actions alone, not on when they run:

    action             holds more                              lets go of (at its end)
    F, not replayed    activation
    F, replayed        checkpoint_input + excluded
    R                  recomputed (the share it replays)
    B                  recomputed (what R left out)            all of the chunk
    I                  recomputed (what R left out)            all but pending_weight
    W                                                          all of the chunk

A chunk is replayed if its row has an R for it.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.plan.action import Kind
from pipeline.plan.costs import Memory, per_stage, share_of_last
from pipeline.plan.plan import Row


class Level(NamedTuple):
    """What a rank holds while an action runs, and after it."""

    during: float
    after: float


class ChunkMemory:
    """The figures of `Memory` for each stage, and the amount that each live chunk of one rank holds."""

    def __init__(self, memory: Memory, stages: int) -> None:
        self.activation = per_stage(memory.activation, stages, "activation")
        self.excluded = per_stage(memory.excluded, stages, "excluded")
        inputs = per_stage(memory.checkpoint_input, stages, "checkpoint_input")
        self.kept = [kept + excluded for kept, excluded in zip(inputs, self.excluded)]
        if memory.recomputed is None:
            self.recomputed = [max(all_ - kept, 0.0) for all_, kept in zip(self.activation, self.excluded)]
        else:
            self.recomputed = per_stage(memory.recomputed, stages, "recomputed")
        self.pending = None
        if memory.pending_weight is not None:
            self.pending = per_stage(memory.pending_weight, stages, "pending_weight")
        self.blocks = per_stage(memory.blocks, stages, "blocks")


def levels(row: Row, figures: ChunkMemory) -> list[Level]:
    """What a rank holds during and after each action of its row."""
    left_out = {
        (action.stage, action.micro_batch): 1.0 - share_of_last(action.last_blocks, figures.blocks[action.stage])
        for action in row
        if action.kind is Kind.R
    }
    held: dict[tuple[int, int], float] = {}
    level = 0.0
    result = []
    for action in row:
        during = level
        after = level
        for stage, kind, micro_batch, _, _ in action.parts:
            chunk = (stage, micro_batch)
            before = held.get(chunk, 0.0)
            if kind is Kind.F:
                grown = shrunk = figures.kept[stage] if chunk in left_out else figures.activation[stage]
            elif kind is Kind.R:
                grown = shrunk = before + (1.0 - left_out[chunk]) * figures.recomputed[stage]
            elif kind is Kind.I:
                grown = before + left_out.get(chunk, 0.0) * figures.recomputed[stage]
                shrunk = grown if figures.pending is None else figures.pending[stage]
            elif kind is Kind.B:
                grown, shrunk = before + left_out.get(chunk, 0.0) * figures.recomputed[stage], 0.0
            elif kind is Kind.W:
                grown, shrunk = before, 0.0
            else:
                continue
            during += grown - before
            after += shrunk - before
            if kind is Kind.B or kind is Kind.W:
                held.pop(chunk, None)
            else:
                held[chunk] = shrunk
        result.append(Level(during, after))
        level = after if held else 0.0
    return result


def live_chunks(row: Row) -> int:
    """The largest number of chunks that a rank has between the start of their F and the end of their B or W."""
    live = peak = 0
    for action in row:
        kinds = [part.kind for part in action.parts]
        live += kinds.count(Kind.F)
        peak = max(peak, live)
        live -= kinds.count(Kind.B) + kinds.count(Kind.W)
    return peak
