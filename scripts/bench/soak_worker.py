"""One rank of the soak, or all of its stages in one process. Started by soak.py.

Under msrun a rank trains its stages by the plan, as a user would. Alone, the process calls the same stages one after
the other for each micro-batch: MindSpore's operators without schedule, chunks or messages.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import psutil
from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.autograd import add_gradient, clear_gradient, recording, run_backward
from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from hyper_parallel.platform.mindspore.memory import live_tensor_count
from hyper_parallel.platform.mindspore.recompute import ENGINE_MODULE, BlockHandle
from pipeline import PipelineStage, Schedule
from scripts.regression.cases import Case
from scripts.regression.models import Stage, data
from scripts.regression.worker import live_objects
from scripts.workers import is_scheduler, reported

SESSION = "pipeline.execution.retention.RecomputeSession"
HANDLES = (f"{BlockHandle.__module__}.{BlockHandle.__name__}", f"{ENGINE_MODULE}._RecomputeHandle")


class Pipelined:
    """This rank's part of the pipeline."""

    def __init__(self, case: Case, world: communication.World) -> None:
        plan = case.plan()
        indices = plan.placement.stages_of(world.rank)
        stages = [PipelineStage(Stage(case, index, plan.stages), index, plan.stages) for index in indices]
        self.schedule = Schedule(plan, stages, world=world)
        self._inputs = data(case)

    def step(self) -> None:
        """Train one step; its gradients are dropped."""
        x, target = self._inputs
        self.schedule.run(x, target=target)
        self.schedule.gradients()


class OneProcess:
    """All stages in this process, called by hand."""

    def __init__(self, case: Case) -> None:
        stages = case.plan().stages
        self._stages = [Stage(case, index, stages) for index in range(stages)]
        self._weights = [weight for stage in self._stages for weight in stage.trainable_params()]
        self._inputs = data(case)

    def step(self) -> None:
        """Forward and backward of every micro-batch; the gradients are added up and dropped."""
        x, target = self._inputs
        for k in range(x.shape[0]):
            self._micro_batch(x.narrow(0, k, 1).contiguous(), target.narrow(0, k, 1).contiguous())
        for weight in self._weights:
            clear_gradient(weight)

    def _micro_batch(self, x: Tensor, target: Tensor) -> None:
        with recording():
            for stage in self._stages[:-1]:
                x = stage(x)
            loss = self._stages[-1](x, target)
            gradients = run_backward([loss], [ops.full_like(loss, 1.0)], self._weights, False)
        for weight, gradient in zip(self._weights, gradients):
            add_gradient(weight, gradient)


def look(step: int, pending: int) -> dict[str, Any]:
    """What is alive in this process, and how much memory it has."""
    alive = live_objects()
    return {
        "step": step,
        "tensors": live_tensor_count(),
        "sessions": alive.get(SESSION, 0),
        "handles": sum(alive.get(kind, 0) for kind in HANDLES),
        "objects": sum(alive.values()),
        "pending": pending,
        "threads": threading.active_count(),
        "resident_kib": psutil.Process().memory_info().rss / 1024,
    }


def soak(step: Callable[[], None], pending: Callable[[], int], options: argparse.Namespace, file: Path) -> None:
    """Warm up, then look at the start and after every `every` steps."""
    for _ in range(options.warm_up):
        step()
    with file.open("w") as samples:
        for done in range(options.steps + 1):
            if done % options.every == 0:
                samples.write(json.dumps(look(done, pending())) + "\n")
                samples.flush()
            if done < options.steps:
                step()


def main(arguments: Optional[list[str]] = None) -> None:
    """Soak as one rank under msrun, else as the one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", type=Case.parse, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    end_with_parent()
    prepare_process()
    if "MS_ROLE" not in os.environ:
        soak(OneProcess(options.case).step, lambda: 0, options, options.folder / "samples.alone.jsonl")
        return
    world = communication.init()
    if is_scheduler():
        return
    with reported(world.rank):
        pipelined = Pipelined(options.case, world)
        file = options.folder / f"samples.rank{world.rank}.jsonl"
        soak(pipelined.step, pipelined.schedule.pending, options, file)
        communication.barrier(world)  # a rank that leaves ends threads of the others
        pipelined.schedule.close()


if __name__ == "__main__":
    main()
