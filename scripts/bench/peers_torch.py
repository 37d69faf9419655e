"""One rank of the MLP pipeline under torch.distributed.pipelining. Started by peers.py, needs torch alone."""

from __future__ import annotations

import argparse
import functools
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from scripts.bench import peer_case
from scripts.bench.calibrated_wait import wait_until
from scripts.bench.peer_case import Case, Step


class WaitForward(torch.autograd.Function):
    """Sleep in place of a block's forward and of its dx. What it saves makes a replay necessary."""

    @staticmethod
    def forward(ctx, x):
        end = time.perf_counter() + peer_case.BLOCK_WAIT
        ctx.save_for_backward(x)
        result = x * 1.0
        wait_until(end)
        return result

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors  # first: it may be replayed here
        wait_until(time.perf_counter() + peer_case.BLOCK_WAIT)
        return gradient


class WaitWeight(torch.autograd.Function):
    """Sleep in place of a block's dw."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight * 1.0

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors  # first: it may be replayed here
        wait_until(time.perf_counter() + peer_case.BLOCK_WAIT)
        return gradient


class MlpBlock(nn.Module):
    """x + W2 relu(W1 rmsnorm(x)). Counts its executions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(peer_case.WIDTH, peer_case.HIDDEN, bias=False)
        self.down = nn.Linear(peer_case.HIDDEN, peer_case.WIDTH, bias=False)
        self.runs = 0

    def forward(self, x):
        self.runs += not x.is_meta
        return x + self.down(torch.relu(self.up(nn.functional.rms_norm(x, (peer_case.WIDTH,)))))


class WaitBlock(nn.Module):
    """Takes the time of a block without its work. Counts its executions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.runs = 0

    def forward(self, x):
        if x.is_meta:
            return x * 1.0
        self.runs += 1
        return WaitForward.apply(x) + WaitWeight.apply(self.weight)


class Stage(nn.Module):
    """Some blocks, each checkpointed or not."""

    def __init__(self, blocks: int, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MlpBlock() if case.compute == "mlp" else WaitBlock() for _ in range(blocks)])
        self.checkpointed = case.checkpoint != "none"

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and not x.is_meta else block(x)
        return x


def mean_square(output, target):
    """The loss of a micro-batch."""
    return ((output - target) ** 2).mean()


class Pipeline:
    """One case on this rank."""

    def __init__(self, case: Case) -> None:
        rank = dist.get_rank()
        indices = {
            "1F1B": [rank],
            "ZB-H1": [rank, rank + peer_case.RANKS],
            "ZB-V": [rank, 2 * peer_case.RANKS - 1 - rank],
        }[case.schedule]
        stages = len(indices) * peer_case.RANKS
        torch.manual_seed(rank)
        self.modules = [Stage(peer_case.BLOCKS // stages, case) for _ in indices]
        stage_of = functools.partial(pipelining.PipelineStage, num_stages=stages, device=torch.device("cpu"))
        pieces = [stage_of(module, index) for module, index in zip(self.modules, indices)]
        self.has_input, self.has_loss = 0 in indices, stages - 1 in indices
        if case.schedule == "1F1B":
            self.schedule = pipelining.Schedule1F1B(pieces[0], peer_case.MICRO_BATCHES, loss_fn=mean_square)
        else:
            maker = {
                "ZB-H1": pipelining.ScheduleInterleavedZeroBubble,
                "ZB-V": pipelining.ScheduleZBVZeroBubble,
            }[case.schedule]
            self.schedule = maker(pieces, peer_case.MICRO_BATCHES, loss_fn=mean_square)
        generator = torch.Generator().manual_seed(7)
        shape = (peer_case.MICRO_BATCHES * peer_case.TOKENS, peer_case.WIDTH)
        self.x, self.target = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def step(self) -> Step:
        """Run one step from cleared gradients."""
        blocks = [block for module in self.modules for block in module.blocks]
        for block in blocks:
            block.runs = 0
            block.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        more = {"target": self.target, "losses": losses} if self.has_loss else {}
        dist.barrier()
        start = time.perf_counter()
        self.schedule.step(*([self.x] if self.has_input else []), **more)
        dist.barrier()
        seconds = time.perf_counter() - start
        loss = float(torch.stack(losses).detach().mean()) if losses else None
        return Step(seconds, tuple(block.runs / peer_case.MICRO_BATCHES for block in blocks), loss)


@contextmanager
def process_group(rank: int, port: int) -> Iterator[None]:
    """Join the other ranks over gloo."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=peer_case.RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Measure the given cases in turn, `repeats` times, after one warm-up step each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cases", type=peer_case.read_cases, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with process_group(options.rank, options.port):
        pipelines = [(case, Pipeline(case)) for case in options.cases]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _, pipeline in pipelines:
            pipeline.step()
        steps = [(case, pipeline.step()) for _ in range(options.repeats) for case, pipeline in pipelines]
        risen = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        peer_case.write_answer(options.folder, options.rank, steps, risen, version=torch.__version__, pid=os.getpid())


if __name__ == "__main__":
    main()
