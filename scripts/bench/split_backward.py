"""What a split backward costs against a whole one, and what it keeps alive in between.

    python scripts/bench/split_backward.py --json split.json

Cases are the models of blocks.py, without checkpoints and with every block checkpointed. Each case has several
processes, one after the other; in each the whole backward and dx with dw take turns, each on a forward of its own. A
ratio is that of one round, as both have then seen the same machine, and the median over the rounds; times are medians
too. (Over processes such a ratio spread by 0.005, that of the shortest times by 0.0065.) Where memory lies is luck that
a process keeps (the same whole backward differs by a sixth from one to the next), so a figure is the median over the
processes, with the smallest and the largest ratio beside it. Each process has one core, as a worker of a pipeline on a
CPU has: OMP_NUM_THREADS alone does not keep MindSpore's matmul from using more.

- full_ms, dx_ms, dw_ms: `replay` says where the replay of a checkpointed block is: `none` (no checkpoint),
  `inside` the full backward and dx, or `before` both (pre-fired, and not in any of the times; that recompute also finds
  the places where weights leave the path of the inputs, which is in dx otherwise).
- sum_ratio: (dx + dw) / full. dx_ratio: dx / full.
- held_mib: alive between dx and dw, per micro-batch, as the memory meter finds it. `retain everything` keeps the graph
  and all recomputed tensors, as a session with retain_on_unpack alone does; `chunk` is a Chunk, `chunk, pre-fired` one
  that was recomputed before dx.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import report
from blocks import CASES, model, normal
from mindspore import Tensor

from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.environment import prepare_process
from hyper_parallel.platform.mindspore.memory import MIB, memory_meter
from pipeline.execution.chunk import Chunk
from scripts.workers import hold_to_a_core

Row = dict[str, Any]

HELD_CASE = "transformer-768"
FIGURES = ("full_ms", "dx_ms", "dw_ms", "sum_ratio", "dx_ratio")
TIMES = ("case", "replay", *FIGURES, "sum_ratio_min", "sum_ratio_max", "dx_ratio_max")
MEMORY = ("case", "mode", "held_mib", "after_mib", "held_ratio")


class Stage:
    """A model with an input and a gradient for its output."""

    def __init__(self, case: str, checkpointed: bool) -> None:
        self.net, shape = model(case, checkpoint_wrapper if checkpointed else lambda block: block)
        self.weights = list(self.net.trainable_params())
        rng = np.random.default_rng(1)
        self.x, self.grad = normal(rng, *shape), normal(rng, *shape)
        self.x.requires_grad_()

    def chunk(self, prefired: bool = False) -> Chunk:
        """A chunk after its forward, or after its recompute."""
        chunk = Chunk(stage=0, micro_batch=0, weights=self.weights)
        chunk.forward(self.net, self.x)
        if prefired:
            chunk.recompute()
        return chunk

    def clear_gradients(self) -> None:
        """Forget what earlier rounds added up."""
        for weight in self.weights:
            autograd.clear_gradient(weight)


def _milliseconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = step()
    took = 1e3 * (time.perf_counter() - start)
    del result
    return took


def measure_times(stage: Stage, prefired: bool, rounds: int, seconds: float) -> Row:
    """Medians of the times and of their ratios, of `rounds` rounds and `seconds` at least."""

    def whole() -> float:
        stage.clear_gradients()
        chunk = stage.chunk(prefired)
        return _milliseconds(lambda: chunk.backward(stage.grad))

    def split() -> tuple[float, float]:
        stage.clear_gradients()
        chunk = stage.chunk(prefired)
        return _milliseconds(lambda: chunk.backward_input(stage.grad)), _milliseconds(chunk.backward_weight)

    found: list[tuple[float, ...]] = []
    end = time.perf_counter() + seconds
    while len(found) < rounds + 2 or time.perf_counter() < end:
        if len(found) % 2:
            full, (dx, dw) = whole(), split()
        else:
            (dx, dw), full = split(), whole()
        found.append((full, dx, dw, (dx + dw) / full, dx / full))
    # The first two rounds fill the memory pool.
    medians = map(statistics.median, zip(*found[2:]))
    return {**{figure: round(median, 3) for figure, median in zip(FIGURES, medians)}, "rounds": len(found) - 2}


def time_rows(case: str, *enough: float) -> list[Row]:
    """The rows of one case: no checkpoint, replay inside, replay before."""
    stage = Stage(case, checkpointed=False)
    rows = [{"case": case, "replay": "none", **measure_times(stage, False, *enough)}]
    stage = Stage(case, checkpointed=True)
    for replay in ("inside", "before"):
        rows.append({"case": case, "replay": replay, **measure_times(stage, replay == "before", *enough)})
    return rows


def over_processes(case: str, processes: int, *enough: float) -> list[Row]:
    """The rows of one case: medians over processes, and how far the ratios spread."""
    runs = [in_a_new_process(time_rows, case, *enough) for _ in range(processes)]
    found = []
    for rows in zip(*runs):
        row = {"case": case, "replay": rows[0]["replay"], "processes": processes}
        row.update({figure: statistics.median(one[figure] for one in rows) for figure in FIGURES})
        for ratio in ("sum_ratio", "dx_ratio"):
            row[f"{ratio}_min"], row[f"{ratio}_max"] = (pick(one[ratio] for one in rows) for pick in (min, max))
        found.append(row)
    return found


def _retaining_everything(stage: Stage, number: int) -> tuple[Callable[[], None], Tensor]:
    """dx by the engine alone, with all that it kept; call what is returned for dw."""
    platform, session = get_platform(), ("retain everything", number)
    with autograd.recording():
        output = stage.net(stage.x)
    with platform.recompute_session_ctx(session, retain_on_unpack=True):
        (input_grad,) = autograd.run_backward([output], [stage.grad], [stage.x], keep_graph=True)

    def weights() -> None:
        with platform.recompute_session_ctx(session, retain_on_unpack=False):
            autograd.run_backward([output], [stage.grad], stage.weights, keep_graph=False)
        platform.clear_recompute_session(session)

    return weights, input_grad


def _with_chunk(stage: Stage, _: int, prefired: bool = False) -> tuple[Callable[[], None], Tensor]:
    chunk = stage.chunk(prefired)
    (input_grad,) = chunk.backward_input(stage.grad)
    return chunk.backward_weight, input_grad


HOLDERS = {
    "retain everything": _retaining_everything,
    "chunk": _with_chunk,
    "chunk, pre-fired": functools.partial(_with_chunk, prefired=True),
}


def memory_rows(case: str, held: int) -> list[Row]:
    """What `held` micro-batches keep between dx and dw, and after dw, divided by their number."""
    stage, meter = Stage(case, checkpointed=True), memory_meter()
    rows: list[Row] = []
    for mode, start in HOLDERS.items():
        for _ in range(2):
            start(stage, -1)[0]()
        empty = meter.alive_bytes()
        # dx itself goes to the stage before, so it counts for neither.
        waiting = [start(stage, number)[0] for number in range(held)]
        between = meter.alive_bytes() - empty
        while waiting:
            waiting.pop()()
        after = meter.alive_bytes() - empty
        rows.append({"case": case, "mode": mode, "held_mib": between / held / MIB, "after_mib": after / held / MIB})
    for row in rows[1:]:
        row["held_ratio"] = round(row["held_mib"] / rows[0]["held_mib"], 3)
    return rows


def _prepare() -> None:
    hold_to_a_core()
    prepare_process()


def in_a_new_process(measure: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """`measure(*arguments)` on one core, where no other model has left its blocks in the memory pool."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_prepare) as process:
        return process.submit(measure, *arguments).result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print two tables, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    parser.add_argument("--case", action="append", choices=CASES, help="only this case (may be given several times)")
    parser.add_argument(
        "--rounds", type=int, default=4, help="whole and split backwards per process and line at least (default 4)"
    )
    parser.add_argument("--seconds", type=float, default=3, help="time per process and line at least (default 3)")
    parser.add_argument("--processes", type=int, default=7, help="processes per case (default 7)")
    parser.add_argument("--held", type=int, default=4, help="micro-batches alive for the memory (default 4)")
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = args.case or CASES
    times = [row for case in cases for row in over_processes(case, args.processes, args.rounds, args.seconds)]
    report.show_table("Split backward against the whole one", times, TIMES)
    memory = in_a_new_process(memory_rows, HELD_CASE, args.held) if HELD_CASE in cases else []
    if memory:
        report.show_table("Alive between dx and dw, MiB per micro-batch", memory, MEMORY)
    if args.json:
        report.write_json(args.json, times, memory=memory, held=args.held, processes=args.processes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
