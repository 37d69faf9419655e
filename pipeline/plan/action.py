"""One step in a rank's list, and its text form.

The text is the one that torch.distributed.pipelining writes: ``2F0`` is the forward of micro-batch 0 through stage 2,
``2SEND_F0`` sends its output to stage 3, ``2RECV_B0`` receives the gradient that stage 3 sent, and
``(0F1;3B2)OVERLAP_F_B`` runs a forward and a backward as one overlapped pair. Two things are added: the recompute
``2R0``, and ``2R0:3``, a recompute of the last three checkpointed blocks only. The blocks that a recompute leaves out
are replayed by the backward itself, so ``2R0:0`` is the lazy recompute: all is replayed when the gradient is there.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class PlanError(ValueError):
    """A plan, or the text of one, is wrong."""


class Kind(str, Enum):
    """What an action does. The value is its text."""

    F = "F"  # forward
    R = "R"  # recompute
    B = "B"  # full backward
    I = "I"  # noqa: E741  gradients of the inputs (dx)
    W = "W"  # gradients of the weights (dw)
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OVERLAP_F_B = "OVERLAP_F_B"

    __str__ = str.__str__
    # Enum hashes in Python code. Plans hold hundreds of thousands of kinds, so use the one written in C.
    __hash__ = str.__hash__


COMMUNICATION = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = COMMUNICATION - SENDS

_SIMPLE = re.compile(r"(\d+)(F|R|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)(?::(\d+))?", re.ASCII)
_OVERLAP = re.compile(r"\(([^()]*);([^()]*)\)OVERLAP_F_B", re.ASCII)


class Action(NamedTuple):
    """One step of one rank.

    Args:
        stage: the stage; for an overlapped pair that of its forward.
        kind: what is done.
        micro_batch: the micro-batch; for an overlapped pair that of its forward.
        sub_actions: the forward and the backward of an overlapped pair, else empty.
        last_blocks: for a recompute, how many of the stage's last checkpointed blocks it replays (None: all).
    """

    stage: int
    kind: Kind
    micro_batch: int
    sub_actions: tuple[Action, ...] = ()
    last_blocks: int | None = None

    def __str__(self) -> str:
        if self.sub_actions:
            return f"({';'.join(map(str, self.sub_actions))}){self.kind.value}"
        blocks = "" if self.last_blocks is None else f":{self.last_blocks}"
        return f"{self.stage}{self.kind.value}{self.micro_batch}{blocks}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The sub-actions of an overlapped pair, or the action itself."""
        return self.sub_actions or (self,)

    @staticmethod
    def overlap(forward: Action, backward: Action) -> Action:
        """The overlapped pair of a forward and a backward."""
        return Action(forward.stage, Kind.OVERLAP_F_B, forward.micro_batch, (forward, backward))

    @staticmethod
    def parse(text: str) -> Action:
        """Read one action. Spaces around it are ignored, anything else that does not belong is a PlanError."""
        text = text.strip()
        pair = _OVERLAP.fullmatch(text)
        if pair:
            forward, backward = Action.parse(pair[1]), Action.parse(pair[2])
            if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.I):
                raise PlanError(
                    f"expected a forward and a backward in an overlapped pair, saw {text!r}; write (0F1;1B0)OVERLAP_F_B"
                )
            return Action.overlap(forward, backward)
        match = _SIMPLE.fullmatch(text)
        if not match or (match[4] is not None and match[2] != "R"):
            raise PlanError(
                f"expected an action such as 0F0, 2SEND_F0, 1R0, 1R0:2 or (0F1;1B0)OVERLAP_F_B, saw {text!r}; "
                "check the stage, the kind and the micro-batch"
            )
        last_blocks = None if match[4] is None else int(match[4])
        return Action(int(match[1]), Kind(match[2]), int(match[3]), (), last_blocks)


def forward(stage: int, micro_batch: int) -> Action:
    """The forward of a micro-batch through a stage."""
    return Action(stage, Kind.F, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """The full backward of a micro-batch through a stage."""
    return Action(stage, Kind.B, micro_batch)


def backward_input(stage: int, micro_batch: int) -> Action:
    """The dx half of a backward."""
    return Action(stage, Kind.I, micro_batch)


def backward_weight(stage: int, micro_batch: int) -> Action:
    """The dw half of a backward."""
    return Action(stage, Kind.W, micro_batch)
