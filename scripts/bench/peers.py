"""Runs the same MLP pipeline under torch.distributed.pipelining and under this project, in turn, on this machine.

    python scripts/bench/peers.py --torch-python venv-torch/bin/python --json peers.json

16 residual MLP blocks x + W2 relu(W1 rmsnorm(x)), width 256, inner width 1024, float32, on 4 ranks with one thread each
(MindSpore keeps to it only where it has one core, so its workers are held to one each), 8 micro-batches of 256 tokens.
Schedules: 1F1B, ZB-H1 (torch: interleaved zero bubble, two stages a rank) and ZB-V. Modes: no checkpointing; every
block recomputed; and, here only, recomputed without the second matmul ("exclude").

Step times come from jobs that run all cases of a peer interleaved, step by step; the peers' jobs alternate over some
rounds. Peak memory is the rise of the resident size over the state before the first step, on the rank where it is
largest, from a job per case. In the waiting version each block sleeps in its forward, dx and dw: cores do not matter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.launch import free_port, python_path
from scripts.bench import peer_case
from scripts.bench.peer_case import Case
from scripts.bench.report import show_table, write_json
from scripts.workers import ONE_THREAD, ROOT, run_workers

SCHEDULES = ("1F1B", "ZB-H1", "ZB-V")
PEERS = {"torch": ("none", "full"), "this project": ("none", "full", "exclude")}
COMPUTES = {"torch": ("mlp", "wait"), "this project": ("mlp", "dense", "wait")}
LIMITS = {"full": 1.4, "exclude": 1.25}
"""Step time of this project's ZB-H1 and ZB-V over its own 1F1B without checkpointing, at most; judged on `mlp`."""
SECONDS_PER_JOB = 500.0

Answers = list[dict[str, Any]]


def main() -> int:
    """Measure, show and judge; 1 if this project misses one of its limits."""
    options = _parser().parse_args()
    peers = [peer for peer in PEERS if peer == "this project" or options.torch_python]
    if not options.torch_python:
        print("torch is not in this Python, so its side is left out: give --torch-python, or install the extra [bench]")
    steps: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for turn in range(options.rounds):
        for peer in peers:
            for compute in (
                COMPUTES[peer] if turn == 0 else COMPUTES[peer][:-1]
            ):  # waiting does not vary: once is enough
                for rank_answer in run_job(peer, cases(peer, compute), options.repeats, options.torch_python):
                    for step in rank_answer["steps"]:
                        steps[peer, step["case"]].append(step)
    memory = {} if options.no_memory else measure_memory(peers, options.torch_python)
    rows = [
        row(peer, case, steps, memory) for peer in peers for compute in COMPUTES[peer] for case in cases(peer, compute)
    ]
    columns = ("case", "mode", "compute", "median s", "fastest s", "over own 1F1B", "block runs", "memory MiB")
    show_table("The same pipeline under both", rows, columns)
    missed = list(misses(rows))
    print("\n".join(missed) or "all limits are met")
    if options.json:
        write_json(options.json, rows, limits=LIMITS, missed=missed)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own = sys.executable if importlib.util.find_spec("torch") else None
    parser.add_argument("--torch-python", default=own, metavar="FILE", help="a Python with torch (default: this one)")
    parser.add_argument("--rounds", type=int, default=3, help="how often the peers' jobs alternate (default 3)")
    parser.add_argument("--repeats", type=int, default=4, help="steps of each case in a job, after one to warm up")
    parser.add_argument("--no-memory", action="store_true", help="leave out the jobs that measure memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    return parser


def cases(peer: str, compute: str) -> list[Case]:
    """What a peer is measured on. Waiting has no second matmul to exclude."""
    modes = [mode for mode in PEERS[peer] if compute != "wait" or mode != "exclude"]
    return [Case(schedule, mode, compute) for mode in modes for schedule in SCHEDULES]


def run_job(peer: str, chosen: Sequence[Case], repeats: int, torch_python: Optional[str]) -> Answers:
    """Run some cases under a peer; returns what each rank wrote."""
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        arguments = ["--cases", json.dumps(chosen), "--repeats", str(repeats), "--folder", name]
        if peer == "torch":
            _run_torch(str(torch_python), arguments, folder)
        else:
            script = Path(__file__).with_name("peers_mindspore.py")
            failure = run_workers(script, peer_case.RANKS, folder, arguments, SECONDS_PER_JOB)
            if failure:
                raise RuntimeError(f"the job of this project failed: {failure}")
        return [json.loads((folder / f"answer.rank{rank}.json").read_text()) for rank in range(peer_case.RANKS)]


def _run_torch(python: str, arguments: Sequence[str], folder: Path) -> None:
    """Start torch's ranks and wait for all; the first that fails ends the others."""
    script = Path(__file__).with_name("peers_torch.py")
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": python_path(ROOT)}
    port = str(free_port())
    ranks = []
    try:
        for rank in range(peer_case.RANKS):
            with (folder / f"rank{rank}.log").open("wb") as log:
                command = [python, str(script), "--rank", str(rank), "--port", port, *arguments]
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + SECONDS_PER_JOB
        while [process.poll() for process in ranks] != [0] * len(ranks):
            late = time.monotonic() > deadline
            bad = [rank for rank, process in enumerate(ranks) if process.poll() or (late and process.poll() is None)]
            if bad:
                log = (folder / f"rank{bad[0]}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"torch's rank {bad[0]} failed or took over {SECONDS_PER_JOB:.0f} s:\n{log}")
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def measure_memory(peers: Sequence[str], torch_python: Optional[str]) -> dict[tuple[str, str], float]:
    """Peak memory in MiB of each case, from a job of its own."""
    return {
        (peer, case.name): max(answer["memory_mib"] for answer in run_job(peer, [case], 1, torch_python))
        for peer in peers
        for case in cases(peer, "mlp")
    }


def row(peer: str, case: Case, steps: dict, memory: dict[tuple[str, str], float]) -> dict[str, Any]:
    """The figures of a case, over all its steps on all ranks: barriers make the ranks of a step take about the same."""
    measured = steps[peer, case.name]
    own = steps[peer, case._replace(schedule="1F1B", checkpoint="none").name]
    seconds, base = ([step["seconds"] for step in group] for group in (measured, own))
    runs = [count for step in measured for count in step["runs"]]
    return {
        "case": f"{peer}, {case.schedule}",
        "peer": peer,
        "schedule": case.schedule,
        "mode": case.checkpoint,
        "compute": case.compute,
        "median s": round(median(seconds), 4),
        "fastest s": round(min(seconds), 4),
        "over own 1F1B": round(median(seconds) / median(base), 3),
        "fastest over own 1F1B": round(min(seconds) / min(base), 3),
        "block runs": f"{min(runs):g}" if min(runs) == max(runs) else f"{min(runs):g} to {max(runs):g}",
        "memory MiB": memory.get((peer, case.name)),
        "all s": seconds,
    }


def misses(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Which limits this project misses."""
    for figures in rows:
        if figures["peer"] != "this project" or figures["schedule"] == "1F1B":
            continue
        where = f"{figures['schedule']}, {figures['mode']}, {figures['compute']}"
        limit = LIMITS.get(figures["mode"]) if figures["compute"] == "mlp" else None
        if limit and figures["over own 1F1B"] > limit:
            yield f"{where}: {figures['over own 1F1B']} times own 1F1B without checkpointing, expected at most {limit}"
        if figures["mode"] != "none" and figures["block runs"] != "2":
            yield f"{where}: each block ran {figures['block runs']} times, expected exactly 2"


if __name__ == "__main__":
    sys.exit(main())
