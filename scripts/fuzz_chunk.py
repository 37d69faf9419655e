"""Drives random programs through chunks in random orders of steps and threads; each must give what it gives plainly.

    python scripts/fuzz_chunk.py --examples 2000

A failure prints its seed and the command that replays it alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> int:
    """Run the checks; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=2000, help="how many programs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program; the others count up from it")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    options = parser.parse_args()
    from scripts.fuzz_recompute import prepare_worker

    prepare_worker()
    from scripts.fuzzing.chunks import check_seed

    done = failed = 0
    started = time.monotonic()
    for seed in track(range(options.seed, options.seed + options.examples), "random programs", transient=True):
        if time.monotonic() - started > 60 * options.minutes:
            break
        done += 1
        try:
            check_seed(seed)
        except Exception as error:
            failed += 1
            command = f"python {Path(__file__).relative_to(ROOT)} --examples 1 --seed {seed}"
            print(f"seed {seed}: {type(error).__name__}: {error}\n  replay: {command}", flush=True)
    print(f"{done} programs from seed {options.seed}, {failed} failed, {time.monotonic() - started:.0f} s")
    return 1 if failed or not done else 0


if __name__ == "__main__":
    sys.exit(main())
