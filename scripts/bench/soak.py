"""Does anything grow while a pipeline trains? 500 steps on 4 workers, and the same operators in one process.

    python scripts/bench/soak.py --json soak.json

Tensors, recompute sessions and handles, messages under way and threads are counted on every rank after a warm-up and
then every 50 steps: they must be the same every time. MindSpore itself loses some resident memory with every operator
on CPU; so what all ranks together grow by in a step is compared with what one process grows by that runs the same
stages on the same micro-batches without the pipeline (checkpointed and excluded alike).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.launch import python_path
from scripts.bench.report import show_table, write_json
from scripts.regression.cases import Case
from scripts.workers import ROOT, run_workers

WORKER = Path(__file__).with_name("soak_worker.py")
CASE = "zb-h1/p4/v1/prefire/region/split/mlp"
FLAT = ("tensors", "sessions", "handles", "objects", "pending", "threads")
ALLOWANCE = 1.05
"""All ranks together may grow by this much of what the one process grows by: sends and receives are operators too."""

Samples = Sequence[dict[str, Any]]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Soak, show and judge; 1 if something grew."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        ranks = soak_workers(options, Path(name))
        alone = soak_alone(options, Path(name))
    rows = [row(f"rank {rank}", samples) for rank, samples in enumerate(ranks)] + [row("one process", alone)]
    show_table(f"{options.steps} steps of {options.case.name}", rows, ("case", *FLAT, "resident KiB/step"))
    together = sum(growth(samples) for samples in ranks)
    print(f"resident memory, KiB per step: {together:.1f} on all ranks together, {growth(alone):.1f} in one process")
    missed = list(misses(ranks, alone))
    print("\n".join(missed) or "nothing grew that should not")
    if options.json:
        samples = {"ranks": ranks, "one process": alone}
        write_json(options.json, rows, missed=missed, steps=options.steps, case=options.case.name, samples=samples)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=Case.parse, default=CASE, help="of the regression matrix (default %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="steps after the warm-up (default 500)")
    parser.add_argument("--warm-up", type=int, default=50, help="steps before the first look (default 50)")
    parser.add_argument("--every", type=int, default=50, help="steps between two looks (default 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    return parser


def soak_workers(options: argparse.Namespace, folder: Path) -> list[Samples]:
    """The samples of every rank."""
    files = [folder / f"samples.rank{rank}.jsonl" for rank in range(options.case.ranks)]

    def lines() -> int:
        return sum(len(read(file)) for file in files if file.exists())

    failure = run_workers(WORKER, options.case.ranks, folder, _arguments(options, folder), progress=lines)
    if failure:
        raise RuntimeError(f"the soak failed: {failure}")
    return [read(file) for file in files]


def soak_alone(options: argparse.Namespace, folder: Path) -> Samples:
    """The samples of the one process."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    subprocess.run([sys.executable, str(WORKER), *_arguments(options, folder)], env=environment, check=True)
    return read(folder / "samples.alone.jsonl")


def _arguments(options: argparse.Namespace, folder: Path) -> list[str]:
    numbers = {"--steps": options.steps, "--warm-up": options.warm_up, "--every": options.every}
    named = {"--case": options.case.name, "--folder": folder, **numbers}
    return [str(word) for pair in named.items() for word in pair]


def read(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of samples; the last one may still be under way."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def growth(samples: Samples) -> float:
    """Resident memory in KiB per step: the slope of the line through the samples."""
    return float(np.polyfit([one["step"] for one in samples], [one["resident_kib"] for one in samples], 1)[0])


def row(name: str, samples: Samples) -> dict[str, Any]:
    """What was seen in one process: each count, or its least and most where it changed."""
    counts = {figure: sorted({one[figure] for one in samples}) for figure in FLAT}
    shown = {figure: str(seen[0]) if len(seen) == 1 else f"{seen[0]} to {seen[-1]}" for figure, seen in counts.items()}
    return {"case": name, **shown, "resident KiB/step": growth(samples)}


def grown(rank: int, samples: Samples) -> list[str]:
    """Which counts of a rank changed, one sentence each."""
    found = []
    for figure in FLAT:
        seen = [one[figure] for one in samples]
        if len(set(seen)) > 1:
            found.append(f"rank {rank}: expected as many {figure} after every step, saw {seen}")
    if samples[0]["pending"]:
        found.append(f"rank {rank}: expected no message under way between steps, saw {samples[0]['pending']}")
    return found


def misses(ranks: Sequence[Samples], alone: Samples) -> list[str]:
    """What grew, one sentence each."""
    found = [problem for rank, samples in enumerate(ranks) for problem in grown(rank, samples)]
    together, limit = sum(map(growth, ranks)), ALLOWANCE * growth(alone)
    if together > limit:
        found.append(
            f"resident memory: {together:.1f} KiB per step on all ranks together, expected at most {limit:.1f}, "
            f"{ALLOWANCE} times that of the same operators in one process"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
