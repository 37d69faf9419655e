"""V-Half and V-Min: a V of two stages per rank with half and a third of 1F1B's memory.

Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory. There a schedule is a building block, the passes
of one micro-batch with their times on every rank, repeated every six units of time (two stages, each F, I and W) and
then squeezed. The distance from F to I in the block sets how many chunks live at once. So here:

1. The block gives each rank the order of its F and I.
2. A list scheduler runs that order in unit steps, each pass as soon as it can, within the memory of the block.
3. W has no place in the order. It fills steps that would be idle, and makes room when the memory is full.
4. While the next pass of the order waits for another rank, a rank may run a later one: an I on the way up, which only
   lets memory go; and, if the block has a gap, an F on the way down, if the passes before it keep the room they need.
"""

from __future__ import annotations

from collections import deque
from typing import Callable, NamedTuple, Optional

from pipeline.plan.action import Action, Kind, backward_input, backward_weight, forward
from pipeline.plan.placement import v_shape
from pipeline.plan.plan import Plan, Row
from pipeline.plan.schedules.row import check_sizes

_PERIOD = 6


class Block(NamedTuple):
    """When one rank runs the passes of the first micro-batch, in units of one pass; `gap` is added before the I."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int


def v_half(ranks: int, micro_batches: int) -> Plan:
    """Half of 1F1B's memory: 2 * floor((ranks + 2) / 2) chunks of half a stage.

    Source: Qi et al. 2024, section 3, V-Half.
    """
    check_sizes(ranks, micro_batches)
    gap = 0 if ranks % 2 else 3

    def block(rank: int) -> Block:
        return Block(
            forward_down=2 * rank,
            forward_up=3 * ranks - 2 - rank,
            input_up=3 * ranks - 1 + 2 * rank + gap,
            input_down=6 * ranks - 2 - rank + gap,
        )

    rows = _Squeeze(ranks, micro_batches, block, memory=2 * ((ranks + 2) // 2), pull_forwards=gap > 0).rows()
    return Plan(rows, v_shape(ranks), micro_batches, "v-half")


def v_min(ranks: int, micro_batches: int) -> Plan:
    """A third of 1F1B's memory: 2 * floor((ranks + 4) / 3) chunks of half a stage.

    Source: Qi et al. 2024, section 3, V-Min.
    """
    check_sizes(ranks, micro_batches)
    gap = 0 if ranks % 3 else 2

    def block(rank: int) -> Block:
        return Block(
            forward_down=rank,
            forward_up=2 * ranks - 1 - rank,
            input_up=2 * ranks + rank + gap,
            input_down=4 * ranks - 1 - rank + gap,
        )

    rows = _Squeeze(ranks, micro_batches, block, memory=2 * ((ranks + 4) // 3), pull_forwards=gap > 0).rows()
    return Plan(rows, v_shape(ranks), micro_batches, "v-min")


class _Rank:
    """One rank while it is scheduled: what is left of its order, what it has run, what it holds."""

    def __init__(self, rank: int, ranks: int, micro_batches: int, block: Block) -> None:
        self.down, self.up = rank, 2 * ranks - 1 - rank
        passes = []
        for k in range(micro_batches):
            shift = _PERIOD * k
            passes += [
                (block.forward_down + shift, forward(self.down, k)),
                (block.forward_up + shift, forward(self.up, k)),
                (block.input_up + shift, backward_input(self.up, k)),
                (block.input_down + shift, backward_input(self.down, k)),
            ]
        self.order = deque(action for _, action in sorted(passes))
        self.pending: deque[Action] = deque()
        self.row: list[Action] = []
        self.before_input = 0

    @property
    def held(self) -> int:
        """Chunks between their F and their W."""
        return self.before_input + len(self.pending)

    def run(self, position: int) -> Action:
        """Run a pass of the order."""
        action = self.order[position]
        del self.order[position]
        self.row.append(action)
        if action.kind is Kind.F:
            self.before_input += 1
        else:
            self.before_input -= 1
            self.pending.append(backward_weight(action.stage, action.micro_batch))
        return action


class _Squeeze:
    """The list scheduler. All passes take one unit; a pass can be used by others from the next unit on."""

    def __init__(
        self, ranks: int, micro_batches: int, block: Callable[[int], Block], memory: int, pull_forwards: bool
    ) -> None:
        self._last_stage = 2 * ranks - 1
        self._ranks = [_Rank(rank, ranks, micro_batches, block(rank)) for rank in range(ranks)]
        self._memory = memory
        self._pull_forwards = pull_forwards
        self._finished: set[tuple[int, Kind, int]] = set()

    def rows(self) -> tuple[Row, ...]:
        """Step until every rank has run everything."""
        while any(rank.order or rank.pending for rank in self._ranks):
            started = [action for rank in self._ranks for action in self._step(rank)]
            self._finished.update((action.stage, action.kind, action.micro_batch) for action in started)
        return tuple(tuple(rank.row) for rank in self._ranks)

    def _step(self, rank: _Rank) -> list[Action]:
        """What a rank runs in this unit, if others may wait for it."""
        position = self._next_pass(rank)
        if position is not None:
            return [rank.run(position)]
        if rank.pending:
            rank.row.append(rank.pending.popleft())
        return []

    def _next_pass(self, rank: _Rank) -> Optional[int]:
        """The place in the order of the pass to run now, None if there is none."""
        if not rank.order:
            return None
        if self._is_ready(rank.order[0]):
            return 0 if rank.order[0].kind is Kind.I or rank.held < self._memory else None
        return self._pulled(rank)

    def _pulled(self, rank: _Rank) -> Optional[int]:
        """Rule 4: the place of the first later pass that may run before its turn."""
        seeks_input = seeks_forward = True
        room = self._pull_forwards and rank.held < self._memory
        held = rank.before_input
        for position, action in enumerate(rank.order):
            if action.kind is Kind.I and action.stage == rank.up and seeks_input:
                if self._is_ready(action):
                    return position
                seeks_input = False
            if action.kind is Kind.F and action.stage == rank.down and seeks_forward:
                if room and self._is_ready(action):
                    return position
                seeks_forward = False
            if not (seeks_input or seeks_forward):
                return None
            held += 1 if action.kind is Kind.F else -1
            room = room and held < self._memory
        return None

    def _is_ready(self, action: Action) -> bool:
        stage, kind, micro_batch, _, _ = action
        if kind is Kind.F:
            return stage == 0 or (stage - 1, Kind.F, micro_batch) in self._finished
        if stage == self._last_stage:
            return (stage, Kind.F, micro_batch) in self._finished
        return (stage + 1, Kind.I, micro_batch) in self._finished
