"""What both peers run: the sizes, the cases and the form of a worker's answer. Imports neither torch nor MindSpore."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

RANKS = 4
MICRO_BATCHES = 8
TOKENS = 256  # in one micro-batch
BLOCKS = 16
WIDTH = 256
HIDDEN = 1024
BLOCK_WAIT = 0.005  # seconds that a block's forward, its dx and its dw take where compute is replaced by waiting


class Case(NamedTuple):
    """One thing to measure.

    Attributes:
        schedule: ``1F1B``, ``ZB-H1`` (torch: interleaved zero bubble) or ``ZB-V``.
        checkpoint: ``none``; ``full``: every block is recomputed; ``exclude``: but not its second matmul.
        compute: ``mlp``: matrices are multiplied with MindSpore's torch-like ``mint.matmul`` (torch: ``nn.Linear``);
            ``dense``: by the older layer ``nn.Dense``, whose backward is faster on CPU; ``wait``: a block sleeps
            and has no matrices.
    """

    schedule: str
    checkpoint: str
    compute: str

    @property
    def name(self) -> str:
        """The case in one word."""
        return "/".join(self)

    @property
    def stages_per_rank(self) -> int:
        """How many stages a rank holds under this project's schedule of that name."""
        return 2 if self.schedule == "ZB-V" else 1


class Step(NamedTuple):
    """What one rank saw of one step.

    Attributes:
        seconds: from the barrier before the step to the barrier after it.
        runs: for each block of the rank, its executions per micro-batch.
        loss: the mean loss of the micro-batches on the rank that has the last stage, else None.
    """

    seconds: float
    runs: tuple[float, ...]
    loss: float | None


def read_cases(text: str) -> list[Case]:
    """Read the cases from a worker's command line."""
    return [Case(*fields) for fields in json.loads(text)]


def write_answer(folder: Path, rank: int, steps: Sequence[tuple[Case, Step]], memory_mib: float, **more: Any) -> None:
    """Leave what a rank measured where the bench looks for it.

    Args:
        folder: the folder of the job.
        rank: this rank.
        steps: every measured step with its case, in the order in which they ran.
        memory_mib: how far the resident memory rose above where it was before the first step, in MiB.
        more: further figures.
    """
    answer = {
        "memory_mib": memory_mib,
        "steps": [{"case": case.name, **step._asdict()} for case, step in steps],
        **more,
    }
    path = folder / f"answer.rank{rank}.json"
    path.write_text(json.dumps(answer))
