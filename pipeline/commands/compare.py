"""``python -m pipeline compare``: a table over schedules and recompute modes, for one or several sizes.

All rows are about the same model: `--cost` is that of a stage when there are as many stages as ranks, and a schedule
with v stages per rank has stages of a v-th of it. A cost file with a number per stage is cut or joined likewise.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.commands.drawing import print_table
from pipeline.commands.options import (
    RECOMPUTE_MODES,
    add_plan_options,
    check_memory_limit,
    check_recompute,
    check_schedule,
    chosen_costs,
    print_json,
    reports_errors,
    with_passes,
)
from pipeline.plan import SCHEDULES, Plan, PlanError, make_plan, simulate, validate
from pipeline.plan.cost_file import CostModel, recut
from pipeline.plan.search import auto

_COLUMNS = (
    "ranks",
    "micro_batches",
    "memory_limit",
    "schedule",
    "recompute",
    "stages_per_rank",
    "makespan",
    "bubble",
    "bubble_share",
    "span_bubble",
    "peak_activations",
    "peak_memory",
    "within_memory_limit",
)


class Case(NamedTuple):
    """One row of the table before it is computed."""

    ranks: int
    micro_batches: int
    memory_limit: float | None
    schedule: str
    recompute: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand. Several values are given with commas between them."""
    add_plan_options(parser, several=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    parser.add_argument("--out", metavar="FILE.json", help="write the table as JSON")


@reports_errors
def run(args: argparse.Namespace) -> int:
    """Print the table, fastest first within each size and limit."""
    from rich.console import Console
    from rich.progress import track

    if args.out and Path(args.out).suffix != ".json":
        raise PlanError(f"expected --out with a file that ends in .json for a comparison, saw {args.out!r}")
    model = chosen_costs(args)
    cases = list(_cases(args))
    steps = track(cases, "compare", console=Console(stderr=True), transient=True, disable=len(cases) < 2)
    rows = sorted((_row(case, args, model) for case in steps), key=_order)
    if args.out:
        Path(args.out).write_text(json.dumps({"rows": rows}))
    if args.csv:
        _write_csv(rows, Path(args.csv))
    if args.json:
        print_json({"rows": rows})
    else:
        _print_table(rows, model.unit)
    return 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for option in ("ranks", "micro_batches"):
        if not getattr(args, option):
            raise PlanError(f"expected --{option.replace('_', '-')}, saw none")
    modes = args.recompute or list(RECOMPUTE_MODES)
    for mode in modes:
        check_recompute(mode)
    for name in args.schedule or ():
        check_schedule(name)
    for limit in args.memory_limit or ():
        check_memory_limit(limit)
    sizes = itertools.product(args.ranks, args.micro_batches, args.memory_limit or [None])
    for (ranks, micro_batches, limit), schedule in itertools.product(sizes, args.schedule or list(SCHEDULES)):
        for mode in modes[-1:] if schedule == "auto" else modes:
            yield Case(ranks, micro_batches, limit, schedule, mode)


def _row(case: Case, args: argparse.Namespace, model: CostModel) -> dict[str, Any]:
    plan, cut = _plan(case, args, model)
    row: dict[str, Any] = {**case._asdict(), "stages_per_rank": None, "makespan": None, "within_memory_limit": False}
    if plan is None:
        return row
    simulation = simulate(validate(plan), cut.costs, cut.memory)
    peak = max(simulation.peak_memory)
    row.update(
        stages_per_rank=plan.stages // plan.ranks,
        makespan=simulation.makespan,
        bubble=simulation.bubble,
        bubble_share=simulation.bubble / (simulation.makespan or 1.0),
        span_bubble=simulation.span_bubble,
        peak_activations=max(simulation.peak_activations),
        peak_memory=peak,
        within_memory_limit=case.memory_limit is None or peak <= case.memory_limit,
    )
    return row


def _plan(case: Case, args: argparse.Namespace, model: CostModel) -> tuple[Plan | None, CostModel]:
    """The plan of a case and its costs; no plan if `auto` finds none within the limit."""
    if case.schedule != "auto":
        plan = make_plan(case.schedule, case.ranks, case.micro_batches, args.virtual)
        plan = with_passes(plan, case.recompute, args.lead, args.max_pending_weight)
        return plan, recut(model, case.ranks, plan.stages)
    cut = recut(model, case.ranks, model.stages or case.ranks * (args.virtual or 1))
    try:
        return _searched(case, cut), cut
    except PlanError:
        return None, cut


def _searched(case: Case, cut: CostModel) -> Plan:
    modes = RECOMPUTE_MODES[: RECOMPUTE_MODES.index(case.recompute) + 1]
    return auto(
        case.ranks, case.micro_batches, cut.costs, cut.memory, case.memory_limit, cut.stages or case.ranks, modes
    ).plan


def _order(row: dict[str, Any]) -> tuple[float, ...]:
    makespan = float("inf") if row["makespan"] is None else row["makespan"]
    limit = float("inf") if row["memory_limit"] is None else row["memory_limit"]
    return (row["ranks"], row["micro_batches"], limit, not row["within_memory_limit"], makespan)


def _write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, _COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _print_table(rows: list[dict[str, Any]], unit: str) -> None:
    from rich.table import Table

    for size, group in itertools.groupby(rows, lambda row: (row["ranks"], row["micro_batches"], row["memory_limit"])):
        ranks, micro_batches, limit = size
        title = f"{ranks} ranks, {micro_batches} micro-batches" + (f", memory limit {limit:g}" if limit else "")
        table = Table()
        table.add_column("schedule")
        table.add_column("recompute")
        makespan = f"makespan ({unit})" if unit else "makespan"
        for heading in ("v", makespan, "against best", "bubble", "bubble %", "peak chunks", "peak memory"):
            table.add_column(heading, justify="right")
        best = None
        for row in group:
            if row["makespan"] is None:
                table.add_row(row["schedule"], row["recompute"], "", "none within the limit", style="red")
                continue
            best = best or row["makespan"] or 1.0
            table.add_row(
                row["schedule"],
                row["recompute"],
                str(row["stages_per_rank"]),
                f"{row['makespan']:g}",
                f"{100 * (row['makespan'] / best - 1):+.1f} %" if row["within_memory_limit"] else "",
                f"{row['bubble']:g}",
                f"{100 * row['bubble_share']:.1f}",
                str(row["peak_activations"]),
                f"{row['peak_memory']:g}" + ("" if row["within_memory_limit"] else " over the limit"),
                style=None if row["within_memory_limit"] else "red",
            )
        print_table(title, table)
