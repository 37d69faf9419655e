"""``python -m pipeline render``: a picture of a plan, and of a measured run beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands.drawing import save
from pipeline.commands.options import add_options_of_one_plan, chosen_plan, reports_errors
from pipeline.plan import Kind, simulate
from pipeline.plan.render import Timeline, simulated, text_boxes

_STYLES = {
    Kind.F: "black on #8ab6e8",
    Kind.R: "black on #c9a6e4",
    Kind.B: "black on #7cc48f",
    Kind.I: "black on #86d0c8",
    Kind.W: "black on #f4bf6b",
    Kind.OVERLAP_F_B: "black on #b9d7a8",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    add_options_of_one_plan(parser)
    parser.add_argument("--measured", metavar="FILE.json", help="the trace of a run, drawn beneath the simulated one")


@reports_errors
def run(args: argparse.Namespace) -> int:
    """Draw into the file of --out; without it print text, or the JSON form of the timelines."""
    timelines = []
    if args.schedule or args.csv or not args.measured:
        plan, model = chosen_plan(args)
        name = f"{plan.name}, {plan.ranks} ranks, {plan.micro_batches} micro-batches"
        timelines.append(simulated(simulate(plan, model.costs, model.memory), name, model.unit))
    if args.measured:
        timelines.append(Timeline.from_json(Path(args.measured).read_text()))
    if args.out:
        save(timelines, args.out, args.memory_limit)
    if args.json:
        print("[" + ", ".join(timeline.to_json() for timeline in timelines) + "]")
    elif not args.out:
        for timeline in timelines:
            _print_grid(timeline)
    return 0


def _print_grid(timeline: Timeline) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    columns = console.width if console.is_terminal else None
    console.print(f"{timeline.name}, {timeline.end:g} {timeline.unit or 'units of time'}", highlight=False)
    for line in text_boxes(timeline, columns):
        pieces = [(box.text, _STYLES[box.kind] if box.kind else "") for box in line]
        console.print(Text.assemble(*pieces), soft_wrap=True)
