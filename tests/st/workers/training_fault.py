"""The training job with one fault in one rank. The fault is named in the environment: TRAINING_FAULT=HOW:RANK:STEP.

HOW is ``raise`` or ``kill``, in the middle of a step, or ``kill-in-checkpoint``, with a stage's file half written.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Optional

from scripts.training import checkpoint, train

HOW, RANK, STEP = os.environ["TRAINING_FAULT"].split(":")


class FaultyWorker(train.Worker):
    """Goes wrong where it was told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.now = 0
        if self.world.rank != int(RANK):
            return
        if HOW == "kill-in-checkpoint":
            checkpoint._force_to_disk = self._die_over_a_file
        else:
            self.schedule.register("B", self._backward)

    def _step(self, step: int) -> Optional[float]:
        self.now = step
        return super()._step(step)

    def _backward(self, step: Any, action: Any) -> None:
        if self.now == int(STEP) and action.micro_batch == 2:
            if HOW == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no luck today")
        step.run_default(action)

    def _die_over_a_file(self, path: Path) -> None:
        if self.now == int(STEP):
            path.write_bytes(path.read_bytes()[:100])
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train.Worker = FaultyWorker
    train.main()
