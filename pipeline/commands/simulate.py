"""``python -m pipeline simulate``: how long a step takes, where it idles, what each rank holds."""

from __future__ import annotations

import argparse

from pipeline.commands.drawing import print_table, save
from pipeline.commands.options import add_options_of_one_plan, chosen_plan, print_json, reports_errors
from pipeline.plan import Plan, Simulation, simulate
from pipeline.plan.render import simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_options_of_one_plan(parser)


@reports_errors
def run(args: argparse.Namespace) -> int:
    """Print the simulation as a table or as JSON."""
    plan, model = chosen_plan(args)
    simulation = simulate(plan, model.costs, model.memory)
    if args.out:
        save([simulated(simulation, plan.name, model.unit)], args.out, args.memory_limit)
    if args.json:
        print_json(summary(plan, simulation, args.memory_limit))
    else:
        _print_table(plan, simulation, args.memory_limit, model.unit)
    return 0


def summary(plan: Plan, simulation: Simulation, memory_limit: float | None) -> dict[str, object]:
    """The JSON form of a simulation. Lists are by rank; `span_bubble` is the largest over ranks."""
    content: dict[str, object] = {
        "name": plan.name,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "span_bubble": simulation.span_bubble,
        "busy": simulation.busy,
        "peak_activations": simulation.peak_activations,
        "peak_memory": simulation.peak_memory,
        "peak_at": [peak and {"action": str(peak.action), "time": peak.time} for peak in simulation.peak_at],
        "plan_actions": sum(map(len, plan.rows)),
    }
    if memory_limit is not None:
        content["within_memory_limit"] = max(simulation.peak_memory) <= memory_limit
    return content


def _print_table(plan: Plan, simulation: Simulation, memory_limit: float | None, unit: str) -> None:
    from rich.table import Table

    bubble = 100 * simulation.bubble / (simulation.makespan or 1.0)
    title = (
        f"{plan.name}: makespan {simulation.makespan:g} {unit or 'units'}, bubble {simulation.bubble:g} "
        f"({bubble:.1f} %), span bubble {simulation.span_bubble:g}, {sum(map(len, plan.rows))} actions"
    )
    table = Table()
    for heading in ("rank", "busy", "idle", "peak chunks", "peak memory"):
        table.add_column(heading, justify="right")
    table.add_column("peak at")
    for rank, busy in enumerate(simulation.busy):
        held, peak = simulation.peak_memory[rank], simulation.peak_at[rank]
        over = memory_limit is not None and held > memory_limit
        table.add_row(
            str(rank),
            f"{busy:g}",
            f"{simulation.makespan - busy:g}",
            str(simulation.peak_activations[rank]),
            f"{held:g}" + (" over the limit" if over else ""),
            f"{peak.action} at {peak.time:g}" if peak else "",
            style="red" if over else None,
        )
    print_table(title, table)
