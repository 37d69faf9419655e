"""``python -m pipeline validate FILE.csv``: everything that is wrong with a plan. Exit code 1 if anything is."""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path

from pipeline.commands.options import print_json, reports_errors
from pipeline.plan import Action, Fault, Plan, PlanError, faults


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
    except PlanError as error:
        found: list[Fault | str] = list(_unreadable(text)) or [str(error)]
    else:
        found = list(faults(plan))
    if args.json:
        print_json({"valid": not found, "faults": [_content(fault) for fault in found]})
    elif found:
        print(*found, sep="\n")
        print(f"{len(found)} {'fault' if len(found) == 1 else 'faults'} in {args.file}")
    else:
        print(f"valid: {plan.ranks} ranks, {plan.stages} stages, {plan.micro_batches} micro-batches")
    return 1 if found else 0


def _unreadable(text: str) -> list[str]:
    """Every cell that is no action, with its row and cell counted from 0."""
    found = []
    for rank, cells in enumerate(csv.reader(io.StringIO(text))):
        for position, cell in enumerate(cells):
            try:
                Plan.from_csv(cell)
            except PlanError as error:
                if cell.strip():
                    found.append(f"rank {rank}, position {position}: {error}")
    return found


def _content(fault: Fault | str) -> dict[str, object]:
    if isinstance(fault, str):
        return {"reason": fault}
    return {"rank": fault.rank, "position": fault.position, "action": str(fault.action), "reason": fault.reason}


__all__ = ["Action", "add_arguments", "run"]
