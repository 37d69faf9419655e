"""One rank of the MLP pipeline under this project. Started by peers.py under msrun."""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from pipeline import PipelineStage, Schedule
from pipeline.plan import insert_recompute, make_plan
from scripts.bench import peer_case
from scripts.bench.peer_case import Case, Step
from scripts.bench.waiting import WaitBlock
from scripts.workers import hold_to_a_core, is_scheduler, reported

PLAN_NAMES = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-V": "zb-v"}


def _values(*shape: int) -> Tensor:
    return Tensor((np.random.default_rng(1).standard_normal(shape) / max(shape) ** 0.5).astype(np.float32))


class Matmul(nn.Cell):
    """A matrix without bias."""

    def __init__(self, name: str, inner: int, outer: int) -> None:
        super().__init__(auto_prefix=False)
        self.weight = Parameter(_values(inner, outer), name=name)

    def construct(self, x: Tensor) -> Tensor:
        """Map (tokens, inner) to (tokens, outer)."""
        return mint.matmul(x, self.weight)


def linear(compute: str, name: str, inner: int, outer: int) -> nn.Cell:
    """A layer that maps (tokens, inner) to (tokens, outer), made as `compute` says."""
    if compute == "mlp":
        return Matmul(name, inner, outer)
    layer = nn.Dense(inner, outer, weight_init=_values(outer, inner), has_bias=False)
    layer.weight.name = name
    return layer


class MlpBlock(nn.Cell):
    """x + W2 relu(W1 rmsnorm(x)). Counts its executions."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(auto_prefix=False)
        self.up = linear(case.compute, f"{name}.up", peer_case.WIDTH, peer_case.HIDDEN)
        self.down = linear(case.compute, f"{name}.down", peer_case.HIDDEN, peer_case.WIDTH)
        self.second = checkpoint_exclude_wrapper(self.down) if case.checkpoint == "exclude" else self.down
        self.runs = 0

    def construct(self, x: Tensor) -> Tensor:
        """Map (tokens, width) to the same shape."""
        self.runs += 1
        normed = x * ops.rsqrt(ops.square(x).mean(-1, keep_dims=True) + 1e-6)
        return x + self.second(mint.nn.functional.relu(self.up(normed)))


class Stage(nn.Cell):
    """Some blocks, each checkpointed or not; the last stage returns the loss."""

    def __init__(self, index: int, stages: int, case: Case) -> None:
        super().__init__(auto_prefix=False)
        share = peer_case.BLOCKS // stages
        names = [f"block{index * share + i}" for i in range(share)]
        blocks = [
            WaitBlock(name, peer_case.BLOCK_WAIT) if case.compute == "wait" else MlpBlock(name, case) for name in names
        ]
        self.blocks = nn.CellList(blocks, auto_prefix=False)
        self.calls = [block if case.checkpoint == "none" else checkpoint_wrapper(block) for block in blocks]
        self.is_last = index == stages - 1

    def construct(self, x: Tensor, target: Tensor = None) -> Tensor:
        """Map (tokens, width) to the same shape, or to the mean square of the distance to `target`."""
        for call in self.calls:
            x = call(x)
        return ops.square(x - target).mean() if self.is_last else x


class Pipeline:
    """One case on this rank."""

    def __init__(self, case: Case, world: communication.World) -> None:
        plan = make_plan(PLAN_NAMES[case.schedule], peer_case.RANKS, peer_case.MICRO_BATCHES)
        if case.checkpoint != "none":
            plan = insert_recompute(plan, "prefire")
        indices = plan.placement.stages_of(world.rank)
        self.world = world
        self.modules = [Stage(index, plan.stages, case) for index in indices]
        stages = [PipelineStage(module, index, plan.stages) for module, index in zip(self.modules, indices)]
        self.schedule = Schedule(plan, stages, world=world)
        generator = np.random.default_rng(7)
        shape = (peer_case.MICRO_BATCHES * peer_case.TOKENS, peer_case.WIDTH)
        self.x, self.target = (Tensor(generator.standard_normal(shape).astype(np.float32)) for _ in range(2))

    def step(self) -> Step:
        """Run one step and drop its gradients."""
        blocks = [block for module in self.modules for block in module.blocks]
        for block in blocks:
            block.runs = 0
        communication.barrier(self.world)
        start = time.perf_counter()
        losses = self.schedule.run(self.x, target=self.target)
        communication.barrier(self.world)
        seconds = time.perf_counter() - start
        self.schedule.gradients()
        loss = float(sum(losses)) / len(losses) if losses else None
        return Step(seconds, tuple(block.runs / peer_case.MICRO_BATCHES for block in blocks), loss)


def main() -> None:
    """Measure the given cases in turn, `repeats` times, after one warm-up step each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=peer_case.read_cases, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    end_with_parent()
    hold_to_a_core()
    prepare_process()
    world = communication.init()
    if is_scheduler():
        return
    with reported(world.rank):
        pipelines = [(case, Pipeline(case, world)) for case in options.cases]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _, pipeline in pipelines:
            pipeline.step()
        steps = [(case, pipeline.step()) for _ in range(options.repeats) for case, pipeline in pipelines]
        risen = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        peer_case.write_answer(options.folder, world.rank, steps, risen, version=ms.__version__, pid=os.getpid())
        for _, pipeline in pipelines:
            pipeline.schedule.close()


if __name__ == "__main__":
    main()
