"""Measure `auto` against the best named schedule: random uneven costs, three memory limits each.

    python scripts/bench/auto_search.py [--sets 20] [--ranks 8] [--micro-batches 32] [--virtual 1]
        [--recompute prefire] [--limits 0.5,1,2] [--json]

A set draws each stage's times and memory at random. The limits are multiples of what the stages of the model hold for
one micro-batch, on average: 1 is about what 1F1B needs on its first rank. Where no named schedule
keeps within the limit there is nothing to compare with, and only that is counted. Everything is simulated; the seconds
are those of the search on this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.plan import Communication, Costs, Memory, PlanError
from pipeline.plan.search import auto

MODES = ("none", "lazy", "prefire")


def uneven_costs(stages: int, seed: int) -> tuple[Costs, Memory]:
    """Times between half and one and a half, memory within 30 %, by stage."""
    draw = random.Random(seed)

    def each(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(stages)]

    costs = Costs(
        forward=each(0.5, 1.5),
        backward_input=each(0.5, 1.5),
        backward_weight=each(0.3, 1.2),
        recompute=each(0.5, 1.5),
        communication=Communication(latency=0.05),
    )
    return costs, Memory(activation=each(0.7, 1.3), checkpoint_input=0.1)


def measure(args: argparse.Namespace, seed: int, chunks: float, modes: tuple[str, ...]) -> dict[str, Any]:
    """One search: what it found, what the best named schedule takes, how long the search took."""
    stages = args.ranks * args.virtual
    costs, memory = uneven_costs(stages, seed)
    row: dict[str, Any] = {"seed": seed, "memory_limit": chunks, "named": None, "named_makespan": None, "gain": None}
    start = time.perf_counter()
    try:
        result = auto(args.ranks, args.micro_batches, costs, memory, chunks, stages, modes, args.effort)
    except PlanError:
        return {**row, "makespan": None, "lower_bound": None, "seconds": time.perf_counter() - start}
    row.update(makespan=result.simulation.makespan, lower_bound=result.lower_bound, seconds=time.perf_counter() - start)
    if result.best_named:
        named = result.best_named.simulation.makespan
        row.update(named=result.best_named.plan.name, named_makespan=named, gain=1.0 - row["makespan"] / named)
    return row


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all searches where a named schedule keeps within the limit: the gains; over all: the seconds."""
    gains = [row["gain"] for row in rows if row["gain"] is not None]
    found = [row for row in rows if row["makespan"] is not None]
    above = [row["makespan"] / row["lower_bound"] - 1.0 for row in found]
    return {
        "searches": len(rows),
        "with_a_named_schedule_within_the_limit": len(gains),
        "found_where_no_named_one_fits": sum(row["gain"] is None for row in found),
        "never_worse": all(gain >= 0.0 for gain in gains),
        "mean_gain": statistics.mean(gains) if gains else None,
        "least_gain": min(gains, default=None),
        "largest_gain": max(gains, default=None),
        "mean_above_lower_bound": statistics.mean(above) if above else None,
        "median_seconds": statistics.median(row["seconds"] for row in rows),
        "most_seconds": max(row["seconds"] for row in rows),
    }


def main() -> int:
    """Run all searches and print a table or JSON; exit code 1 if one was worse than a named schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=20, help="how many random cost sets (default 20)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--virtual", type=int, default=1, help="stages per rank (default 1)")
    parser.add_argument("--recompute", choices=MODES, default="prefire", help="the most that plans may use")
    parser.add_argument("--limits", default="0.5,1,2", help="memory limits (default 0.5,1,2)")
    parser.add_argument("--effort", type=float, default=1.0, help="of the search (default 1)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    stages = args.ranks * args.virtual
    limits = [float(share) * stages for share in args.limits.split(",")]
    modes = MODES[: MODES.index(args.recompute) + 1]
    cases = [(seed, chunks) for seed in range(args.sets) for chunks in limits]
    steps = track(cases, "search", console=Console(stderr=True), transient=True)
    rows = [measure(args, seed, chunks, modes) for seed, chunks in steps]
    by_limit = {str(limit): summarize([row for row in rows if row["memory_limit"] == limit]) for limit in limits}
    total = summarize(rows)
    if args.json:
        print(json.dumps({"arguments": vars(args), "total": total, "by_limit": by_limit, "rows": rows}))
    else:
        print_table({**by_limit, "all": total})
    return 0 if total["never_worse"] else 1


def print_table(summaries: dict[str, dict[str, Any]]) -> None:
    """One row per limit."""
    table = Table()
    for heading in ("limit", "searches", "named fits", "mean gain", "least", "largest", "above bound", "seconds"):
        table.add_column(heading, justify="right")
    for limit, summary in summaries.items():
        shares = [summary[name] for name in ("mean_gain", "least_gain", "largest_gain", "mean_above_lower_bound")]
        table.add_row(
            limit,
            str(summary["searches"]),
            str(summary["with_a_named_schedule_within_the_limit"]),
            *("" if share is None else f"{100 * share:.1f} %" for share in shares),
            f"{summary['median_seconds']:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
