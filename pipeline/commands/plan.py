"""``python -m pipeline plan``: make a plan, print it or write it."""

from __future__ import annotations

import argparse

from pipeline.commands.drawing import save
from pipeline.commands.options import add_options_of_one_plan, chosen_plan, print_json, reports_errors
from pipeline.plan import Plan, simulate
from pipeline.plan.render import simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_options_of_one_plan(parser)


@reports_errors
def run(args: argparse.Namespace) -> int:
    """Print the plan as CSV unless it is written to a file, or as JSON."""
    plan, model = chosen_plan(args)
    if args.out:
        timeline = simulated(simulate(plan, model.costs, model.memory), plan.name, model.unit)
        save([timeline], args.out, args.memory_limit)
    if args.json:
        print_json(_content(plan))
    elif not args.out and not (args.csv and args.schedule):
        print(plan.to_csv(), end="")
    return 0


def _content(plan: Plan) -> dict[str, object]:
    return {
        "name": plan.name,
        "ranks": plan.ranks,
        "stages": plan.stages,
        "micro_batches": plan.micro_batches,
        "placement": list(plan.placement.rank_by_stage),
        "digest": plan.digest(),
        "plan_actions": sum(map(len, plan.rows)),
        "rows": [[str(action) for action in row] for row in plan.rows],
    }
