"""Measure how long it takes to import `pipeline.plan` and to simulate large plans, and how much memory that needs.

    python scripts/bench/plan_speed.py [--schedule 1f1b] [--json]

Each figure comes from a process of its own: the fastest of three, and its peak memory. Making and validating the plan
counts in `seconds`; `simulate_seconds` is the simulation alone. Exit code 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
IMPORT_LIMIT = 0.3
SIZES = ((16, 512, 2.0, None), (64, 1024, 20.0, 2048.0))
"""Ranks, micro-batches, most seconds, most MiB."""

_IMPORT = """
import json, resource, sys, time
start = time.perf_counter()
import pipeline.plan
seconds = time.perf_counter() - start
assert "mindspore" not in sys.modules
"""
_SIMULATE = """
from pipeline.plan import make_plan, simulate, validate
start = time.perf_counter()
plan = validate(make_plan({schedule!r}, {ranks}, {micro_batches}))
ready = time.perf_counter()
simulation = simulate(plan)
end = time.perf_counter()
seconds, simulate_seconds = end - start, end - ready
"""
_REPORT = """
figures = {name: value for name, value in globals().items() if name in ("seconds", "simulate_seconds")}
figures["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(figures))
"""


def measure(code: str) -> dict[str, float]:
    """The figures of the fastest of three processes that run the code."""
    command = [sys.executable, "-c", code + _REPORT]
    runs = [subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout for _ in range(3)]
    return min(map(json.loads, runs), key=lambda figures: figures["seconds"])


def rows_for(schedule: str) -> list[dict[str, Any]]:
    """A row for the import and for each size, with the limits."""
    rows = [{"what": "import pipeline.plan", **measure(_IMPORT), "most_seconds": IMPORT_LIMIT, "most_mib": None}]
    for ranks, micro_batches, most_seconds, most_mib in SIZES:
        code = _IMPORT + _SIMULATE.format(schedule=schedule, ranks=ranks, micro_batches=micro_batches)
        what = f"{schedule}, {ranks} ranks, {micro_batches} micro-batches"
        rows.append({"what": what, **measure(code), "most_seconds": most_seconds, "most_mib": most_mib})
    for row in rows:
        fits = row["most_mib"] is None or row["mib"] <= row["most_mib"]
        row["passed"] = fits and row["seconds"] <= row["most_seconds"]
    return rows


def main() -> int:
    """Measure and print a line per figure, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="of the simulated plans (default 1f1b)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = rows_for(args.schedule)
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            simulated = f", of which simulate {row['simulate_seconds']:.3f} s" if "simulate_seconds" in row else ""
            verdict = (
                "passed" if row["passed"] else f"missed the limit of {row['most_seconds']} s, {row['most_mib']} MiB"
            )
            print(f"{row['what']}: {row['seconds']:.3f} s{simulated}, {row['mib']:.0f} MiB: {verdict}")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
