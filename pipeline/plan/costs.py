"""What a stage costs: time of its actions, time of a transfer, memory that a chunk holds.

Every figure is one number for all stages, or a sequence with one number per stage. Units are the caller's: the results
come out in the unit that went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Union

from pipeline.plan.action import PlanError

PerStage = Union[float, Sequence[float]]


def per_stage(value: PerStage, stages: int, what: str) -> list[float]:
    """One number for each stage.

    Raises:
        PlanError: a sequence of another length, or a number that is negative, infinite or none.
    """
    values = [value] * stages if isinstance(value, (int, float)) else list(value)
    if len(values) != stages:
        raise PlanError(
            f"expected one number or {stages} (one per stage) for {what}, saw {len(values)}; check the costs"
        )
    if any(not 0 <= number < float("inf") for number in values):
        raise PlanError(f"expected finite numbers from 0 up for {what}, saw {values}; check the costs")
    return values


@dataclass(frozen=True)
class Communication:
    """Time of a transfer between two ranks: latency + size / bandwidth. Transfers do not slow each other.

    Args:
        latency: time of an empty message.
        bandwidth: size per time; infinite by default, so that only the latency counts.
        forward_size: size of what a stage sends to the next one.
        backward_size: size of the gradient that a stage sends to the one before.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    forward_size: PerStage = 0.0
    backward_size: PerStage = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < float("inf"):
            raise PlanError(f"expected a finite latency from 0 up, saw {self.latency}; check the costs")
        if not self.bandwidth > 0:
            raise PlanError(f"expected a bandwidth above 0, saw {self.bandwidth}; check the costs")

    def forward_times(self, stages: int) -> list[float]:
        """For each stage the time of sending its output."""
        return [self.latency + size / self.bandwidth for size in per_stage(self.forward_size, stages, "forward_size")]

    def backward_times(self, stages: int) -> list[float]:
        """For each stage the time of sending its input gradient."""
        return [self.latency + size / self.bandwidth for size in per_stage(self.backward_size, stages, "backward_size")]


@dataclass(frozen=True)
class Costs:
    """Time of the actions of each stage.

    Args:
        forward: F.
        backward_input: I, the dx half.
        backward_weight: W, the dw half. A full backward B takes both.
        recompute: R of all checkpointed blocks of the stage. Blocks that R leaves out are added to the backward.
        blocks: how many checkpointed blocks a stage has, for an R of the last k.
        overlapped: a whole overlapped pair, by the stage of its forward; None: its parts one after the other.
            What the pair's backward has to replay comes on top.
        communication: transfers between ranks.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    recompute: PerStage = 0.0
    blocks: int | Sequence[int] = 1
    overlapped: PerStage | None = None
    communication: Communication = field(default_factory=Communication)


@dataclass(frozen=True)
class Memory:
    """What a chunk (one micro-batch through one stage) holds. See `pipeline.plan.footprint` for when.

    Args:
        activation: what the forward of a chunk that is not checkpointed saves for its backward.
        checkpoint_input: what the forward of a checkpointed chunk keeps to replay from.
        excluded: what the excluded regions of a checkpointed chunk keep from the forward on.
        recomputed: what a replay of all blocks makes; None: activation - excluded.
        pending_weight: what is held between dx and dw; None: all that was held at dx.
        blocks: how many checkpointed blocks a stage has, for a recompute of the last k.
    """

    activation: PerStage = 1.0
    checkpoint_input: PerStage = 0.0
    excluded: PerStage = 0.0
    recomputed: PerStage | None = None
    pending_weight: PerStage | None = None
    blocks: int | Sequence[int] = 1


def share_of_last(last_blocks: int | None, blocks: float) -> float:
    """The part of a stage's checkpointed blocks that a recompute of the last k replays."""
    if last_blocks is None:
        return 1.0
    return min(last_blocks, blocks) / max(blocks, 1)
