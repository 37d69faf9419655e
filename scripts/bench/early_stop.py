"""What a replay saves that ends at the last tensor it has to make, as a part of the whole replay of MLP blocks.

    python scripts/bench/early_stop.py --json early_stop.json

The residual MLP blocks of blocks.py without a norm, every block checkpointed; forward and backward of the modes
take turns in one process. `plain` has no checkpoint, `whole` is MindSpore's recompute with `early_stop=False`, which
runs each block to its end again, `native` the same with `early_stop=True`, and `ours` is `checkpoint_wrapper`. The
replay is what a mode takes longer than plain.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import report
from blocks import model, normal

from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.environment import prepare_process

CASES = ("mlp-256", "mlp-1024")
COLUMNS = ("case", "mode", "step_ms", "replay_ms", "replay_ratio")


def _native(block: Callable[..., Any], early_stop: bool) -> Callable[..., Any]:
    return lambda x: mindspore.recompute(block, x, use_reentrant=False, early_stop=early_stop)


MODES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda block: block,
    "whole": lambda block: _native(block, False),
    "native": lambda block: _native(block, True),
    "ours": checkpoint_wrapper,
}


def stepper(case: str, mode: str) -> Callable[[], float]:
    """A function that runs one step of a mode and returns how many milliseconds it took."""
    net, shape = model(case, MODES[mode])
    weights = list(net.trainable_params())
    rng = np.random.default_rng(1)
    x, grad = normal(rng, *shape), normal(rng, *shape)
    x.requires_grad_()

    def step() -> float:
        start = time.perf_counter()
        with autograd.recording():
            output = net(x)
        autograd.run_backward([output], [grad], [x, *weights], keep_graph=False)
        return 1e3 * (time.perf_counter() - start)

    return step


def rows(case: str, rounds: int) -> list[dict[str, Any]]:
    """The medians of one case; `replay_ratio` is the replay over that of `whole`."""
    steppers = {mode: stepper(case, mode) for mode in MODES}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds + 2):
        for mode, step in steppers.items():
            found[mode].append(step())
    steps = {mode: statistics.median(times[2:]) for mode, times in found.items()}
    replays = {mode: steps[mode] - steps["plain"] for mode in MODES if mode != "plain"}
    return [
        {
            "case": case,
            "mode": mode,
            "step_ms": steps[mode],
            "replay_ms": replays.get(mode),
            "replay_ratio": round(replays[mode] / replays["whole"], 3) if mode in replays else None,
        }
        for mode in MODES
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    parser.add_argument("--case", action="append", choices=CASES, help="only this case (may be given several times)")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each mode (default 30)")
    args = parser.parse_args(arguments)
    prepare_process()
    found = [row for case in args.case or CASES for row in rows(case, args.rounds)]
    report.show_table("Forward and backward with every block checkpointed", found, COLUMNS)
    if args.json:
        report.write_json(args.json, found, rounds=args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
