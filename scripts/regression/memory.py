"""What a rank's chunks hold in a step, beside what the simulator says.

The chunks are asked after every action. What one chunk of a stage holds after its F, R and I goes into the simulator's
memory figures; the simulator then says how many chunks, and how many bytes, the rank holds at most.
"""

from __future__ import annotations

from typing import Any

from pipeline import Schedule
from pipeline.execution.chunk import Chunk, ChunkState
from pipeline.plan import Action, Kind, simulate
from pipeline.plan.costs import Memory, share_of_last
from scripts.regression.cases import BLOCKS_PER_STAGE

SAMPLED = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)


class ChunkSampler:
    """Asks the chunks of a schedule after every action of a step."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._chunks: dict[tuple[int, int], Chunk] = {}
        self._held: dict[tuple[int, Kind], int] = {}
        self._most_chunks = self._most_bytes = 0
        for kind in SAMPLED:
            schedule.register(kind, self._sample)

    def peaks(self) -> dict[str, Any]:
        """Stop sampling. The most chunks and bytes held between two actions, and what the simulator expects."""
        for kind in SAMPLED:
            self._schedule.register(kind, None)
        self._chunks.clear()
        plan, rank = self._schedule.plan, self._schedule.rank
        simulation = simulate(plan, memory=self._memory())
        return {
            "peak_chunks": self._most_chunks,
            "expected_chunks": simulation.peak_activations[rank],
            "peak_bytes": self._most_bytes,
            "expected_bytes": max(level.after for level in simulation.levels[rank]),
        }

    def _sample(self, step: Any, action: Action) -> None:
        """Run an action. Within an overlapped pair the chunks are counted between its halves, as the simulator does."""
        for part in action.parts:
            step.run_default(part)
            key = (part.stage, part.micro_batch)
            chunk = step.chunk(part)
            if chunk is not None:
                self._chunks[key] = chunk
                self._held.setdefault((part.stage, part.kind), chunk.held_bytes())
            self._chunks = {key: chunk for key, chunk in self._chunks.items() if chunk.state is not ChunkState.RELEASED}
            self._most_chunks = max(self._most_chunks, len(self._chunks))
        self._most_bytes = max(self._most_bytes, sum(chunk.held_bytes() for chunk in self._chunks.values()))

    def _memory(self) -> Memory:
        """The simulator's figures, from what one chunk of each stage of this rank held."""
        stages = range(self._schedule.plan.stages)
        fired = {part.stage: part.last_blocks for part in self._actions() if part.kind is Kind.R}
        after_forward = [self._held.get((stage, Kind.F), 0) for stage in stages]
        recomputed = [0.0] * len(stages)
        for stage, last_blocks in fired.items():
            share = share_of_last(last_blocks, BLOCKS_PER_STAGE)
            grown = self._held[stage, Kind.R] - after_forward[stage]
            recomputed[stage] = max(grown, 0) / share if share else 0.0
        return Memory(
            activation=after_forward,
            checkpoint_input=after_forward,
            recomputed=recomputed,
            pending_weight=[self._held.get((stage, Kind.I), 0) for stage in stages],
            blocks=BLOCKS_PER_STAGE,
        )

    def _actions(self) -> list[Action]:
        return [part for action in self._schedule.plan.rows[self._schedule.rank] for part in action.parts]
