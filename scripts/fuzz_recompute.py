"""Checks the recompute core on many random programs: wrapped, each must give bitwise what it gives plainly.

    python scripts/fuzz_recompute.py --examples 20000 --jobs 2

A failure prints its seed, the program, and the command that replays it alone.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]


def prepare_worker() -> None:
    """Make the checkout importable and MindSpore quick, and keep what exists out of the counts of Tensor objects."""
    sys.path.insert(0, str(ROOT))
    import mindspore

    mindspore.set_device("CPU")
    mindspore.runtime.launch_blocking()
    from scripts.fuzzing.check import forget_what_exists

    forget_what_exists()


def check_one(seed: int) -> tuple[int, str]:
    """Check the program of one seed. Returns the seed and what went wrong, or an empty text."""
    from scripts.fuzzing.check import check_seed

    try:
        check_seed(seed)
    except Exception as error:
        return seed, f"{type(error).__name__}: {error}"
    return seed, ""


def check_all(first: int, examples: int, minutes: float | None, jobs: int) -> Iterator[tuple[int, str]]:
    """Yield the result of every seed from `first` on, until there are enough or the time is over."""
    end = time.monotonic() + 60 * minutes if minutes else float("inf")
    seeds = iter(range(first, first + examples))
    spawn = multiprocessing.get_context("spawn")
    running: dict[Future, int] = {}
    with ProcessPoolExecutor(min(jobs, examples), mp_context=spawn, initializer=prepare_worker) as pool:
        while True:
            # Few at a time: so the time limit holds, and if a worker dies, few seeds come into question.
            ahead = 2 * jobs - len(running) if time.monotonic() < end else 0
            running.update((pool.submit(check_one, seed), seed) for seed in itertools.islice(seeds, ahead))
            if not running:
                return
            finished = wait(running, return_when=FIRST_COMPLETED).done
            try:
                yield from [future.result() for future in finished]
            except BrokenProcessPool:
                yield from ((seed, "a worker died on this or another one listed here") for seed in running.values())
                return
            for future in finished:
                del running[future]


def describe(seed: int, fault: str) -> str:
    """Say what failed and how to see it again."""
    from scripts.fuzzing.programs import random_program

    command = f"python {Path(__file__).relative_to(ROOT)} --examples 1 --seed {seed}"
    return f"seed {seed}: {fault}\n  {random_program(random.Random(seed))}\n  replay: {command}"


def main() -> int:
    """Run the checks; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=20_000, help="how many programs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; the others count up from it")
    parser.add_argument("--minutes", type=float, help="stop after this time, however many programs are left")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes (default: one per core)")
    options = parser.parse_args()

    sys.path.insert(0, str(ROOT))
    done = failed = 0
    started = time.monotonic()
    results = check_all(options.seed, options.examples, options.minutes, options.jobs)
    for seed, fault in track(results, total=options.examples, description="random programs", transient=True):
        done += 1
        if fault:
            failed += 1
            print(describe(seed, fault), flush=True)
    seconds = time.monotonic() - started
    print(
        f"{done} programs, seeds {options.seed} to {options.seed + done - 1}, {failed} failed, {seconds:.0f} s, "
        f"{done / seconds / options.jobs:.1f} programs per second and process"
    )
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
