"""One rank of the schedule bench: runs many plans whose actions wait in place of computing. Started by msrun."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mindspore import Tensor, nn

from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.autograd import recording
from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from pipeline import PipelineStage, Schedule
from pipeline.execution.executor import Step
from pipeline.plan import Action, Costs, Kind, Plan
from pipeline.plan.action import COMMUNICATION
from pipeline.plan.durations import Durations
from pipeline.plan.placement import mapping
from scripts.bench.calibrated_wait import wait_until
from scripts.bench.waiting import WaitBlock
from scripts.workers import is_scheduler, reported

WIDTH = 16
WAITS = 0.75
"""The part of an action that its block waits; the rest is for the chunk's own work, and waited for if there is any."""
COMPUTE = tuple(kind for kind in Kind if kind not in COMMUNICATION)


class Stage(nn.Cell):
    """One block that waits; the last stage returns a loss."""

    def __init__(self, index: int, stages: int, seconds: float, checkpointed: bool) -> None:
        super().__init__(auto_prefix=False)
        self.block = WaitBlock(f"block{index}", WAITS * seconds)
        self.call = checkpoint_wrapper(self.block) if checkpointed else self.block
        self.is_last = index == stages - 1

    def construct(self, x: Tensor) -> Tensor:
        """Map a tensor to the same shape, or to a scalar."""
        x = self.call(x)
        return x.mean() if self.is_last else x


class FullLength:
    """Runs each action and then waits until it has taken what the simulator is told that it takes.

    Args:
        plan: whose actions are run.
        seconds: that F, R, dx and dw take, each.
    """

    def __init__(self, plan: Plan, seconds: float) -> None:
        self._durations = Durations(plan, Costs(seconds, seconds, seconds, seconds))
        self.parts: dict[str, list[float]] = {kind.name: [] for kind in COMPUTE}
        """By kind of action, what part of its time each one needed: more than 1 if it did more than it should."""

    def hook(self, step: Step, action: Action) -> None:
        """What the executor calls for each action that computes."""
        start, duration = time.perf_counter(), self._durations.of(action)
        step.run_default(action)
        if duration:  # a lazy R replays nothing
            self.parts[action.kind.name].append((time.perf_counter() - start) / duration)
            wait_until(start + duration)


def read_plan(description: dict[str, Any]) -> Plan:
    """Read a plan as the bench wrote it."""
    return Plan.from_csv(description["csv"], mapping(description["rank_by_stage"]), name=description["name"])


def message_seconds(world: communication.World, rest: float, rounds: int = 20) -> float:
    """Return how long a message takes that comes after `rest` seconds without work, as those of a step do.

    Neighbours exchange messages in pairs, all pairs at the same time. The median; 0.0 for a rank without a partner.
    """
    partner = world.rank ^ 1
    if partner >= world.size:
        return 0.0
    tensor, times = Tensor(np.ones((1, WIDTH), np.float32)), []
    for _ in range(rounds):
        if world.rank < partner:
            time.sleep(rest)
            start = time.perf_counter()
            communication.send(world, tensor, partner)
            communication.receive(world, tensor.shape, tensor.dtype, partner)
            times.append((time.perf_counter() - start) / 2)
        else:
            communication.send(world, communication.receive(world, tensor.shape, tensor.dtype, partner), partner)
    return statistics.median(times) if times else 0.0


def measure(description: dict[str, Any], seconds: float, repeats: int, world: communication.World) -> dict[str, Any]:
    """Run a plan once to warm up and then `repeats` times.

    Returns:
        For each step when this rank started and ended, in seconds of the machine's clock; the runs of each block; and
        by kind of action what part of its time it needed, the median.
    """
    plan = read_plan(description)
    indices = plan.placement.stages_of(world.rank)
    cells = [Stage(index, plan.stages, seconds, description["checkpointed"]) for index in indices]
    stages = [PipelineStage(cell, index, plan.stages) for cell, index in zip(cells, indices)]
    schedule, full_length = Schedule(plan, stages, world=world), FullLength(plan, seconds)
    for kind in COMPUTE:
        schedule.register(kind, full_length.hook)
    x = Tensor(np.ones((plan.micro_batches, WIDTH), np.float32))
    x.requires_grad_()
    times = [_step(schedule, x, world) for _ in range(repeats + 1)][1:]
    schedule.close()
    runs = [cell.block.runs / plan.micro_batches / (repeats + 1) for cell in cells]
    parts = {kind: statistics.median(some) for kind, some in full_length.parts.items() if some}
    return {"name": description["name"], "mode": description["mode"], "times": times, "runs": runs, "parts": parts}


def _step(schedule: Schedule, x: Tensor, world: communication.World) -> tuple[float, float]:
    communication.barrier(world)
    start = time.monotonic()
    with recording():  # the parts of x need a gradient as x does: the simulator counts a dx for the first stage, too
        schedule.run(x)
    end = time.monotonic()
    schedule.gradients()
    return start, end


def main(arguments: Optional[list[str]] = None) -> None:
    """Measure every plan of the file that is given, and leave the times in the same folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", type=Path)
    options = parser.parse_args(arguments)
    work = json.loads(options.plans.read_text())
    end_with_parent()
    prepare_process()
    world = communication.init()
    if is_scheduler():
        return
    folder = options.plans.parent
    with reported(world.rank), (folder / f"times.rank{world.rank}.jsonl").open("w") as file:
        (folder / f"message.rank{world.rank}.json").write_text(json.dumps(message_seconds(world, work["seconds"])))
        for description in work["plans"]:
            answer = measure(description, work["seconds"], work["repeats"], world)
            file.write(json.dumps(answer) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
