"""Ranks arranged as pipeline x data: several copies of one pipeline, each with its own part of the batch."""

from __future__ import annotations

from typing import NamedTuple


class RankGrid(NamedTuple):
    """World rank = pipeline rank x copies + copy, so the ranks that add up gradients with each other are neighbours.

    Args:
        pipeline: ranks of one pipeline.
        copies: how many pipelines work side by side.
    """

    pipeline: int
    copies: int = 1

    def pipeline_rank(self, world_rank: int) -> int:
        """The row of the plan that a world rank runs."""
        return world_rank // self.copies

    def copy_of(self, world_rank: int) -> int:
        """Which of the pipelines a world rank belongs to."""
        return world_rank % self.copies

    def world_rank(self, pipeline_rank: int, copy: int) -> int:
        """The world rank of a row of the plan in one of the pipelines."""
        return pipeline_rank * self.copies + copy

    def same_stages(self, world_rank: int) -> tuple[int, ...]:
        """The world ranks that hold the same stages as this one, itself included."""
        first = self.pipeline_rank(world_rank) * self.copies
        return tuple(range(first, first + self.copies))
