"""The command line ``python -m pipeline``: a table of subcommands.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> exit code``; it is imported only when it
is asked for, so that one subcommand's needs are not another's.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Optional

__all__ = ["SUBCOMMANDS", "main"]

SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("pipeline.doctor", "tell whether this machine can run the project"),
    "launch": ("pipeline.commands.launch", "run a script on several workers and tell the first error"),
    "plan": ("pipeline.commands.plan", "make a plan and print or write it"),
    "validate": ("pipeline.commands.validate", "say everything that is wrong with a plan"),
    "simulate": ("pipeline.commands.simulate", "say how long a step takes and what each rank holds"),
    "compare": ("pipeline.commands.compare", "compare schedules and recompute modes"),
    "render": ("pipeline.commands.render", "draw a plan, and a measured run beside it"),
}


def _parser(wanted: Optional[str]) -> argparse.ArgumentParser:
    """Return the parser; only the wanted subcommand's module is imported for its arguments."""
    parser = argparse.ArgumentParser(prog="pipeline", description="Pipeline parallelism with activation recompute.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == wanted:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the subcommand that the arguments name and return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    parsed = _parser(wanted).parse_args(arguments)
    return int(parsed.run(parsed) or 0)


if __name__ == "__main__":
    sys.exit(main())
