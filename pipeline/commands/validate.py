"""``python -m pipeline validate FILE.csv``: everything that is wrong with a plan. Exit code 1 if anything is."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands.options import print_json, reports_errors
from pipeline.plan import Fault, Plan, PlanError, faults


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("file", metavar="FILE.csv", help="a row per rank, an action per cell")
    parser.add_argument("--micro-batches", metavar="M", type=int, help="default: the largest in the file, plus one")
    parser.add_argument("--json", action="store_true", help="print the faults as JSON")


@reports_errors
def run(args: argparse.Namespace) -> int:
    """Print every fault; 0 if there is none, else 1."""
    text = Path(args.file).read_text()
    try:
        plan = Plan.from_csv(text, micro_batches=args.micro_batches, name=Path(args.file).stem)
        found: list[Fault | str] = list(faults(plan))
    except PlanError as error:
        found = list(str(error).splitlines())
    if args.json:
        print_json({"valid": not found, "faults": [_content(fault) for fault in found]})
    elif found:
        print(*found, sep="\n")
        print(f"{len(found)} {'fault' if len(found) == 1 else 'faults'} in {args.file}")
    else:
        print(f"valid: {plan.ranks} ranks, {plan.stages} stages, {plan.micro_batches} micro-batches")
    return 1 if found else 0


def _content(fault: Fault | str) -> dict[str, object]:
    if isinstance(fault, str):
        return {"reason": fault}
    return {"rank": fault.rank, "position": fault.position, "action": str(fault.action), "reason": fault.reason}
