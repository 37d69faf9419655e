"""Measures steps of every schedule and recompute mode on real workers, beside what the simulator says.

Messages, executor, chunks and replays are real; only the compute of each action is replaced by waiting, so that 4 and 8
ranks can be timed on few cores. F, dx, dw and the recompute of a stage take the same time (20 ms by default): its block
waits for three quarters of it in each, the chunk's own work fits into the rest, and what is left is waited for when the
action is done. The simulator is told this time, and how long a message takes, which the workers measure before the
steps; nothing of what lies between actions. `bare ratio` compares with messages that take no time.

`ratio` above 1 is what lies between actions, and what does not fit into them: `fullest` is the largest part of its time
that a kind of action needed (the largest over ranks and kinds, of medians over actions). A replay at the wrong place or
one too many needs more than there is; and each block must run once, or twice with recompute.

    python scripts/bench/schedule_efficiency.py --ranks 4 8 --json efficiency.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.plan import Plan, insert_communication, insert_recompute, make_plan, simulate
from pipeline.plan.costs import Communication, Costs
from pipeline.plan.schedules import SCHEDULES
from scripts.bench.report import plot_bars, show_table, write_json
from scripts.workers import run_workers

WORKER = Path(__file__).with_name("schedule_efficiency_worker.py")
MODES = ("none", "lazy", "prefire")
LIMIT = 1.06
"""A measured step may take this much of the simulated one."""
GAIN = 0.8
"""Pre-fired 1F1B must save at least this part of (p-1) r."""


def main() -> int:
    """Measure, show and judge; 1 if a ratio or the gain of pre-firing misses its limit."""
    options = _parser().parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        rows += measure(ranks, options)
    columns = ("case", "mode", "simulated ms", "measured ms", "fastest ms", "ratio", "bare ratio", "fullest")
    show_table(f"Steps with {options.cost:g} ms per action", rows, columns)
    gains = [gain for ranks in options.ranks for gain in prefire_gains(rows, ranks, options.cost)]
    for gain in gains:
        print(gain["text"])
    if options.json:
        write_json(options.json, rows, gains=gains, limits={"ratio": LIMIT, "gain": GAIN}, arguments=vars_of(options))
    if options.plot:
        plot_bars(options.plot, rows, {"ratio": "measured / simulated"})
    missed = [text for row in rows for text in misses(row)]
    missed += [gain["text"] for gain in gains if gain["schedule"] == "1f1b" and gain["share"] < GAIN]
    print(f"{len(missed)} misses in {len(rows)} cases" + "".join(f"\n  {text}" for text in missed))
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="numbers of ranks (default 4 8)")
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=tuple(SCHEDULES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--cost", type=float, default=20.0, metavar="MS", help="time of F, dx, dw and R (default 20)")
    parser.add_argument("--repeats", type=int, default=3, help="steps to measure after one to warm up (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios to FILE (png, svg or pdf)")
    return parser


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    """The command line, for the record."""
    return {
        name: value if isinstance(value, (int, float, str)) else str(value) for name, value in vars(options).items()
    }


def plans(ranks: int, options: argparse.Namespace) -> Iterator[tuple[str, str, Plan]]:
    """Schedule, recompute mode and plan of everything to measure."""
    costs = costs_of(options.cost)
    for schedule in options.schedules:
        for mode in options.modes:
            plan = make_plan(schedule, ranks, 2 * ranks)
            plan = plan if mode == "none" else insert_recompute(plan, mode)
            yield schedule, mode, insert_communication(plan, costs)


def costs_of(cost: float, message: float = 0.0) -> Costs:
    """The costs that the simulator is told: of each action, and of a message."""
    link = Communication(latency=message)
    return Costs(forward=cost, backward_input=cost, backward_weight=cost, recompute=cost, communication=link)


def measure(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all plans for a number of ranks in one job."""
    chosen = list(plans(ranks, options))
    descriptions = [
        {
            "name": schedule,
            "mode": mode,
            "checkpointed": mode != "none",
            "csv": plan.to_csv(),
            "rank_by_stage": plan.placement.rank_by_stage,
        }
        for schedule, mode, plan in chosen
    ]
    with tempfile.TemporaryDirectory(prefix="schedule-efficiency-") as name:
        folder = Path(name)
        work = {"seconds": options.cost / 1000, "repeats": options.repeats, "plans": descriptions}
        (folder / "plans.json").write_text(json.dumps(work))

        def lines() -> int:
            return sum(file.read_text().count("\n") for file in folder.glob("times.rank*.jsonl"))

        failure = run_workers(WORKER, ranks, folder, [str(folder / "plans.json")], progress=lines)
        if failure:
            raise RuntimeError(f"the job with {ranks} ranks failed: {failure}")
        times = [json.loads((folder / f"message.rank{rank}.json").read_text()) for rank in range(ranks)]
        message = 1000 * median(filter(None, times))
        answers = [
            [json.loads(line) for line in (folder / f"times.rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]
    return [_row(ranks, plan, given, options.cost, message) for (_, _, plan), *given in zip(chosen, *answers)]


def _row(ranks: int, plan: Plan, answers: Sequence[dict[str, Any]], cost: float, message: float) -> dict[str, Any]:
    steps = zip(*(answer["times"] for answer in answers))
    measured = [1000 * (max(end for _, end in step) - min(start for start, _ in step)) for step in steps]
    simulated = simulate(plan, costs_of(cost, message)).makespan
    return {
        "case": f"{answers[0]['name']} p={ranks}",
        "schedule": answers[0]["name"],
        "ranks": ranks,
        "mode": answers[0]["mode"],
        "simulated ms": simulated,
        "measured ms": median(measured),
        "fastest ms": min(measured),
        "all ms": measured,
        "message ms": message,
        "ratio": median(measured) / simulated,
        "bare ratio": median(measured) / simulate(plan, costs_of(cost)).makespan,
        "fullest": max(part for answer in answers for part in answer["parts"].values()),
        "parts by rank": [answer["parts"] for answer in answers],
        "block runs": sorted({runs for answer in answers for runs in answer["runs"]}),
    }


def misses(row: dict[str, Any]) -> list[str]:
    """What of a case is not as it must be, in words."""
    expected = [1.0 if row["mode"] == "none" else 2.0]
    wrong = {
        f"ratio {row['ratio']:.3f}": row["ratio"] > LIMIT,
        f"an action needs {row['fullest']:.2f} of its time": row["fullest"] > 1,
        f"block runs {row['block runs']}": row["block runs"] != expected,
    }
    return [f"{row['case']}, {row['mode']}: {text}" for text, is_wrong in wrong.items() if is_wrong]


def prefire_gains(rows: Sequence[dict[str, Any]], ranks: int, cost: float) -> list[dict[str, Any]]:
    """For each schedule by how much pre-firing beats the lazy replay, in (p-1) r."""
    times = {(row["schedule"], row["mode"]): row["measured ms"] for row in rows if row["ranks"] == ranks}
    gains = []
    for schedule in dict.fromkeys(schedule for schedule, _ in times):
        if {(schedule, "lazy"), (schedule, "prefire")} <= set(times):
            saved = times[schedule, "lazy"] - times[schedule, "prefire"]
            share = saved / ((ranks - 1) * cost)
            text = f"p={ranks}, {schedule}: pre-fired saves {saved:.1f} ms = {share:.2f} (p-1) r"
            gains.append({"schedule": schedule, "ranks": ranks, "saved ms": saved, "share": share, "text": text})
    return gains


if __name__ == "__main__":
    sys.exit(main())
