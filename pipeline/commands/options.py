"""The options that the plan commands share, and what they mean."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any, Callable

from pipeline.plan import SCHEDULES, Plan, PlanError, make_plan, validate
from pipeline.plan.cost_file import CostModel, read_cost_file, read_cost_text
from pipeline.plan.passes import insert_recompute, limit_pending_weight

RECOMPUTE_MODES = ("none", "lazy", "prefire")


def add_plan_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """The options that say which plan, at what costs.

    Args:
        parser: the subcommand's parser.
        several: take lists with commas where a sweep makes sense.
    """
    names = ", ".join([*SCHEDULES, "auto"])
    number, numbers = (_list_of(int), "P,...") if several else (int, "P")
    real = _list_of(float) if several else float
    text = _list_of(str) if several else str
    parser.add_argument("--schedule", metavar="NAME", type=text, help=f"one of {names}")
    parser.add_argument("--ranks", metavar=numbers, type=number, help="how many ranks")
    parser.add_argument(
        "--micro-batches", metavar=numbers.replace("P", "M"), type=number, help="how many micro-batches"
    )
    parser.add_argument(
        "--virtual", metavar="V", type=int, help="stages per rank, where the schedule leaves the choice"
    )
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument(
        "--cost",
        metavar="f=1,b=1,w=1,r=0,c=0",
        help="time of forward, dx, dw, recompute per stage and of a transfer; also memory of a chunk: a=1 activations, "
        "i=0 checkpoint input, e=0 kept by excluded regions",
    )
    costs.add_argument("--cost-file", metavar="FILE", help="JSON with a number per stage for each of these")
    parser.add_argument(
        "--recompute",
        metavar="|".join(RECOMPUTE_MODES),
        type=text,
        help="what each chunk replays, and when; with auto, the most that the search may use",
    )
    parser.add_argument("--lead", metavar="K", type=int, default=1, help="fire a recompute K actions ahead (default 1)")
    parser.add_argument("--max-pending-weight", metavar="N", type=int, help="at most N chunks between dx and dw")
    parser.add_argument("--memory-limit", metavar="X", type=real, help="most memory per rank, in the unit of the costs")


def add_options_of_one_plan(parser: argparse.ArgumentParser) -> None:
    """The options of a command that works on one plan: which plan, and where the result goes."""
    add_plan_options(parser)
    parser.add_argument("--csv", metavar="FILE", help="the plan: written if --schedule makes one, else read")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE.svg|.png|.json", help="a picture, or a trace that Perfetto opens")


def reports_errors(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Print what is wrong with the options or files as one message, and return 2."""

    @functools.wraps(run)
    def with_report(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except PlanError as error:
            message = str(error)
        except UnicodeDecodeError as error:
            message = f"expected a text file, saw bytes that are none ({error}); check the path"
        except OSError as error:
            message = f"expected a file that can be opened, saw {error.filename!r} ({error.strerror}); check the path"
        print(f"pipeline {args.command}: {message}", file=sys.stderr)
        return 2

    return with_report


def chosen_plan(args: argparse.Namespace) -> tuple[Plan, CostModel]:
    """The plan that the options of `add_options_of_one_plan` ask for, validated, and its costs.

    Raises:
        PlanError: options are missing, do not go together or are out of range, or the plan is wrong.
    """
    model = chosen_costs(args)
    return validate(_plan(args, model)), model


def _plan(args: argparse.Namespace, model: CostModel) -> Plan:
    """The plan that is asked for.

    Raises:
        PlanError: options are missing, do not go together or are out of range.
    """
    check_memory_limit(args.memory_limit)
    if args.lead != 1 and args.recompute != "prefire" and args.schedule != "auto":
        raise PlanError(
            f"expected --lead together with --recompute prefire, saw --recompute {args.recompute or 'none'}"
        )
    if args.schedule is None:
        if args.csv is None:
            raise PlanError("expected --schedule NAME, or --csv FILE with a plan to read, saw neither")
        plan = Plan.from_csv(Path(args.csv).read_text(), micro_batches=args.micro_batches, name=Path(args.csv).stem)
        return with_passes(plan, args.recompute or "none", args.lead, args.max_pending_weight)
    for option in ("ranks", "micro_batches"):
        if getattr(args, option) is None:
            raise PlanError(f"expected --{option.replace('_', '-')} with --schedule, saw none")
    check_schedule(args.schedule)
    if args.schedule == "auto":
        plan = _searched(args, model)
    else:
        plan = make_plan(args.schedule, args.ranks, args.micro_batches, args.virtual)
        plan = with_passes(plan, args.recompute or "none", args.lead, args.max_pending_weight)
    if args.csv:
        Path(args.csv).write_text(plan.to_csv())
    return plan


def with_passes(plan: Plan, recompute: str, lead: int, max_pending_weight: int | None) -> Plan:
    """The plan with recompute inserted and pending dw bounded, as asked for."""
    check_recompute(recompute)
    if max_pending_weight is not None:
        plan = limit_pending_weight(plan, max_pending_weight)
    return plan if recompute == "none" else insert_recompute(plan, recompute, lead)


def check_recompute(mode: str) -> None:
    """Raise PlanError if there is no such recompute mode."""
    if mode not in RECOMPUTE_MODES:
        raise PlanError(f"expected --recompute {'|'.join(RECOMPUTE_MODES)}, saw {mode!r}")


def check_schedule(name: str) -> None:
    """Raise PlanError if there is no such schedule."""
    if name not in (*SCHEDULES, "auto"):
        raise PlanError(f"expected one of {', '.join([*SCHEDULES, 'auto'])} for --schedule, saw {name!r}")


def check_memory_limit(limit: float | None) -> None:
    """Raise PlanError if a limit is given that nothing could keep within."""
    if limit is not None and not limit > 0:
        raise PlanError(f"expected a --memory-limit above 0, saw {limit:g}")


def chosen_costs(args: argparse.Namespace) -> CostModel:
    """The costs of `--cost` or `--cost-file`."""
    if args.cost_file:
        return read_cost_file(Path(args.cost_file))
    return read_cost_text(args.cost or "")


def _searched(args: argparse.Namespace, model: CostModel) -> Plan:
    mode = args.recompute or "none"
    check_recompute(mode)
    if args.max_pending_weight is not None or args.lead != 1:
        raise PlanError("expected auto without --lead and --max-pending-weight, which the search chooses itself")
    from rich.console import Console
    from rich.progress import Progress

    from pipeline.plan.search import auto

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("search", total=1.0)
        result = auto(
            args.ranks,
            args.micro_batches,
            model.costs,
            model.memory,
            args.memory_limit,
            model.stages or args.ranks * (args.virtual or 1),
            RECOMPUTE_MODES[: RECOMPUTE_MODES.index(mode) + 1],
            progress=lambda share: progress.update(task, completed=share),
        )
    best = result.best_named
    gain = 1.0 - result.simulation.makespan / best.simulation.makespan if best else 0.0
    against = f"{100 * gain:.2f} % less than {best.plan.name}" if best else "no named schedule keeps within the limit"
    print(f"auto: {result.simulation.makespan:g}, {against}", file=sys.stderr)
    return result.plan


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(item) for item in text.split(",") if item]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def print_json(content: Any) -> None:
    """One JSON value on standard output."""
    print(json.dumps(content))
