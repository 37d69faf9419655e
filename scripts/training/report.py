"""What a job leaves in its output folder: metrics, pictures, summary."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from pipeline.plan import Plan
from pipeline.plan.costs import Costs
from pipeline.plan.render import Timeline, chrome_trace, save_picture, simulated
from pipeline.plan.simulate import simulate

__all__ = [
    "draw_losses",
    "draw_timeline",
    "drop_metrics_after",
    "measured_costs",
    "read_metrics",
    "read_ranks",
    "summarise",
    "write_json",
]


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a last line that is still being written is left out."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def read_ranks(out: Path) -> list[dict[str, Any]]:
    """Return what the workers of this machine wrote at their end, in the order of their ranks."""
    found = [json.loads(file.read_text()) for file in out.glob("ranks/rank-*.json")]
    return sorted(found, key=lambda record: record["rank"])


def drop_metrics_after(file: Path, step: int) -> None:
    """Keep the lines up to a step: what came after its checkpoint will be done again."""
    kept = [json.dumps(line) + "\n" for line in read_metrics(file) if line["step"] <= step]
    if file.exists():
        temporary = file.with_suffix(".writing")
        temporary.write_text("".join(kept))
        temporary.replace(file)


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file that is either whole or not there."""
    temporary = file.with_name(file.name + ".writing")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)


def draw_losses(metrics: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw training and validation loss over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], label="training", linewidth=1)
    checked = [m for m in metrics if m.get("validation_loss") is not None]
    axes.plot(
        [m["step"] for m in checked], [m["validation_loss"] for m in checked], "o-", label="held out", markersize=3
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def draw_timeline(out: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Draw the last step of the ranks of this machine, and below it what the simulator makes of the same plan.

    Writes ``timeline.json`` (the events), ``timeline.png``, and ``timeline.perfetto.json`` for a trace viewer.
    """
    events = [rank["trace"] for rank in ranks]
    if not any(events):
        return
    write_json(out / "timeline.json", {"name": "measured", "unit": "s", "events": events})
    measured = Timeline.from_json((out / "timeline.json").read_text())
    timelines = [measured]
    plan = Plan.from_csv((out / "plan.csv").read_text(), name=str(ranks[0].get("plan", "plan")))
    if plan.ranks == len(events):
        costs = measured_costs(measured, plan.stages)
        again = simulated(simulate(plan, costs), "simulated, each action as long as its measured mean", "s")
        timelines.append(replace(again, memory=()))  # nobody measured what a chunk keeps
    save_picture(timelines, out / "timeline.png")
    (out / "timeline.perfetto.json").write_text(chrome_trace(timelines))


def measured_costs(measured: Timeline, stages: int) -> Costs:
    """Return the mean time of each stage's actions; a full backward counts as dx without dw."""
    times: dict[tuple[str, int], list[float]] = {}
    for row in measured.events:
        for event in row:
            times.setdefault((event.action.kind.value, event.action.stage), []).append(event.end - event.start)

    def means(*kinds: str) -> list[float]:
        samples = [[time for kind in kinds for time in times.get((kind, stage), [])] for stage in range(stages)]
        return [sum(sample) / len(sample) if sample else 0.0 for sample in samples]

    return Costs(forward=means("F"), backward_input=means("B", "I"), backward_weight=means("W"), recompute=means("R"))


def summarise(metrics: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of a job.

    Args:
        metrics: the lines of metrics.jsonl.
        ranks: what each worker of this machine wrote at its end: ``rank``, ``peak_memory_mib``, ``micro_batches`` run,
            and ``runs``, how often each cell ran for them; names start with ``block`` or ``excluded``.
    """
    speeds = sorted(m["tokens_per_s"] for m in metrics)
    return {
        "steps": metrics[-1]["step"] if metrics else 0,
        "first_loss": metrics[0]["loss"] if metrics else None,
        "last_loss": metrics[-1]["loss"] if metrics else None,
        "last_validation_loss": next((m["validation_loss"] for m in reversed(metrics) if "validation_loss" in m), None),
        "tokens_per_s": round(speeds[len(speeds) // 2], 1) if speeds else None,
        "block_runs_per_micro_batch": _per_micro_batch(ranks, "block"),
        "excluded_runs_per_micro_batch": _per_micro_batch(ranks, "excluded"),
        "peak_memory_mib": {str(r["rank"]): round(r["peak_memory_mib"], 1) for r in ranks},
    }


def _per_micro_batch(ranks: Sequence[Mapping[str, Any]], kind: str) -> Optional[float]:
    """Return the executions of a cell per micro-batch: the mean over all cells, a whole number when all agree."""
    rates = [
        count / rank["micro_batches"]
        for rank in ranks
        if rank["micro_batches"]
        for name, count in rank["runs"].items()
        if name.startswith(kind)
    ]
    if not rates:
        return None
    mean = sum(rates) / len(rates)
    return int(mean) if mean == int(mean) and min(rates) == max(rates) else mean
