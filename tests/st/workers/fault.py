"""Something goes wrong in the second step. Arguments: raise, kill, hang or freeze; time-out in seconds; rank."""

from __future__ import annotations

import os
import signal
import sys
import threading

from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import prepare_process
from pipeline import PipelineStage, Schedule1F1B
from pipeline.execution.monitor import INTERVAL
from pipeline.launch import mark_finished
from tests.st import harness
from tests.st.workers import model

MICRO_BATCHES = 4


def misbehave(how: str) -> None:
    """Do it."""
    if how == "raise":
        raise ValueError("no luck")
    if how == "kill":
        threading.Event().wait(3 * INTERVAL)  # rank 0 tells where it is in intervals, so its action has to last
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


def main() -> None:
    """Train; one rank misbehaves in backward 2 of the second step."""
    how, timeout, culprit = sys.argv[1], float(sys.argv[2]), int((sys.argv[3:] or ["1"])[0])
    prepare_process("CPU")
    world = communication.init()
    stage = PipelineStage(model.piece(world.rank, world.size), world.rank, world.size)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, timeout=timeout)
    x, labels = model.batch(8)
    steps = 0

    def backward(step, action) -> None:
        if world.rank == culprit and steps == 1 and action.micro_batch == 2:
            misbehave(how)
        step.run_default(action)

    schedule.register("B", backward)
    for _ in range(3):
        schedule.run(x, labels=labels)
        schedule.gradients()
        steps += 1
        harness.write_result(world.rank, {"steps": steps})
    mark_finished(world.rank)


if __name__ == "__main__" and not harness.is_scheduler():
    main()
elif __name__ == "__main__":
    prepare_process("CPU")
    communication.init()
