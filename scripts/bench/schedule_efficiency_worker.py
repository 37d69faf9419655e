"""One rank of the schedule bench: runs many plans on stages that wait in place of computing. Started by msrun."""

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
from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from pipeline import PipelineStage, Schedule
from pipeline.plan import Plan
from pipeline.plan.placement import mapping
from scripts.bench.waiting import WaitBlock
from scripts.workers import is_scheduler, reported


class Stage(nn.Cell):
    """One block that waits; the last stage returns a loss."""

    def __init__(self, index: int, stages: int, seconds: float, checkpointed: bool) -> None:
        super().__init__(auto_prefix=False)
        self.block = WaitBlock(f"block{index}", seconds)
        self.call = checkpoint_wrapper(self.block) if checkpointed else self.block
        self.is_last = index == stages - 1

    def construct(self, x: Tensor) -> Tensor:
        """Map a tensor to the same shape, or to a scalar."""
        x = self.call(x)
        return x.mean() if self.is_last else x


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
    tensor, times = Tensor(np.ones((1, 16), np.float32)), []
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
        For each step when this rank started and ended, in seconds of the machine's clock, and the runs of each block.
    """
    plan = read_plan(description)
    indices = plan.placement.stages_of(world.rank)
    cells = [Stage(index, plan.stages, seconds, description["checkpointed"]) for index in indices]
    stages = [PipelineStage(cell, index, plan.stages) for cell, index in zip(cells, indices)]
    schedule = Schedule(plan, stages, world=world)
    x = Tensor(np.ones((plan.micro_batches, 16), np.float32))
    times = [_step(schedule, x, world) for _ in range(repeats + 1)][1:]
    schedule.close()
    runs = [cell.block.runs / plan.micro_batches / (repeats + 1) for cell in cells]
    return {"name": description["name"], "mode": description["mode"], "times": times, "runs": runs}


def _step(schedule: Schedule, x: Tensor, world: communication.World) -> tuple[float, float]:
    communication.barrier(world)
    start = time.monotonic()
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
