"""The options of the training job, shared by the launcher and its workers, and the checks that need no worker."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from pipeline import machines
from pipeline.plan import Plan, PlanError
from pipeline.plan.schedules import SCHEDULES, TAKES_VIRTUAL, make_plan
from scripts.training.text_files import check_data, default_data

__all__ = ["OptionError", "check", "model_sizes", "parse", "plan_of"]

RECOMPUTE = ("prefire", "lazy")
_MODEL_SIZES = ("layers", "width", "heads", "experts", "experts_per_token", "expert_width", "length", "seed")
_AT_LEAST_ONE = (
    *("steps", "checkpoint_every", "validate_every", "batch", "micro_batches", "stages"),
    *("layers", "length", "width", "heads", "experts", "experts_per_token", "expert_width"),
)


class OptionError(ValueError):
    """The options contradict each other; the message says what to change."""


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the options, with the defaults that depend on others filled in."""
    options = _parser().parse_args(arguments)
    options.out = (options.out or Path("out") / time.strftime("train-%Y%m%d-%H%M%S")).resolve()
    options.data = (options.data or default_data()).resolve()
    if options.workers is None:
        options.workers = max(1, options.stages // (max(1, options.nodes) * _stages_per_worker(options.schedule)))
    return options


def _stages_per_worker(schedule: str) -> int:
    return 2 if schedule in TAKES_VIRTUAL else make_plan(schedule, 4, 8).stages // 4


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan that the options describe, without recompute and communication.

    Raises:
        OptionError: there is no such plan; the message says what to change.
    """
    ranks = options.workers * options.nodes
    virtual = max(1, options.stages // ranks) if options.schedule in TAKES_VIRTUAL else None
    try:
        plan = make_plan(options.schedule, ranks, options.micro_batches, virtual)
    except PlanError as error:
        raise OptionError(
            f"schedule {options.schedule} does not exist for {ranks} workers, {options.stages} stages and "
            f"{options.micro_batches} micro-batches ({error}): change one of them"
        ) from error
    if plan.stages != options.stages:
        machines = "" if options.nodes == 1 else f" on {options.nodes} machines"
        raise OptionError(
            f"--stages {options.stages} does not match {ranks} workers{machines}: with schedule {options.schedule} "
            f"they run {plan.stages} stages, so give --stages {plan.stages}, or another --workers"
        )
    return plan


def model_sizes(options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the model by name, as ``ModelShape`` takes them."""
    return {name: getattr(options, name) for name in _MODEL_SIZES}


def check(options: argparse.Namespace) -> None:
    """Find contradictions among the options before any worker starts.

    Raises:
        OptionError, MachineError, DataError: one sentence that says what is wrong and what to change.
    """
    for name in _AT_LEAST_ONE:
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag} is {getattr(options, name)}, but must be at least 1: give --{flag} 1 or more")
    if options.batch % options.micro_batches:
        raise OptionError(
            f"--batch {options.batch} cannot be cut into {options.micro_batches} equal micro-batches: "
            f"make --batch a multiple of --micro-batches, as {_next_multiple(options.batch, options.micro_batches)}"
        )
    if options.layers < options.stages:
        raise OptionError(
            f"--layers {options.layers} is fewer than --stages {options.stages}, and a stage needs at least one layer: "
            f"give --layers {options.stages} or more, or fewer stages"
        )
    machines.check_options(options)
    plan_of(options)
    if options.width % options.heads:
        raise OptionError(f"--width {options.width} is not a multiple of --heads {options.heads}: change one of them")
    if options.experts_per_token > options.experts:
        raise OptionError(f"--experts-per-token {options.experts_per_token} is more than --experts {options.experts}")
    check_data(options.data)


def _next_multiple(value: int, of: int) -> int:
    return (value // of + 1) * of


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells a default only where there is one to tell."""

    def _get_help_string(self, action: argparse.Action) -> Optional[str]:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/train.sh",
        description=(
            "Train a small mixture-of-experts language model over a pipeline of stages, one worker per stage. "
            "DEVICE_TARGET=Ascend in the environment takes NPUs instead of the CPU."
        ),
        formatter_class=_Help,
    )
    job = parser.add_argument_group("job")
    job.add_argument(
        "--steps", type=int, default=70, help="train until this many steps are done, those before a resume included"
    )
    job.add_argument("--out", type=Path, help="output folder; a new one under out/ when not given")
    job.add_argument(
        "--data", type=Path, help="text file or folder to learn; Python's own standard library when not given"
    )
    job.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint in --out")
    job.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="steps between checkpoints")
    job.add_argument("--validate-every", type=int, default=20, metavar="N", help="steps between validations")
    job.add_argument("--sample-bytes", type=int, default=200, metavar="N", help="length of the text written at the end")
    shape = parser.add_argument_group("pipeline")
    shape.add_argument("--stages", type=int, default=4, metavar="P", help="pieces that the model is cut into")
    shape.add_argument("--workers", type=int, metavar="N", help="workers on each machine; one per stage when not given")
    shape.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="order of forwards and backwards")
    shape.add_argument("--recompute", choices=RECOMPUTE, default="prefire", help="when activations are recomputed")
    shape.add_argument("--batch", type=int, default=32, metavar="B", help="sequences per step")
    shape.add_argument("--micro-batches", type=int, default=8, metavar="M", help="pieces that a batch is cut into")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4, metavar="L", help="transformer blocks")
    model.add_argument("--width", type=int, default=64, help="size of a token's vector")
    model.add_argument("--heads", type=int, default=4, help="attention heads")
    model.add_argument("--experts", type=int, default=4, help="experts per block")
    model.add_argument("--experts-per-token", type=int, default=2, help="experts that each token goes through")
    model.add_argument("--expert-width", type=int, default=128, help="inner size of an expert")
    model.add_argument("--length", type=int, default=64, help="bytes that the model sees at once")
    model.add_argument("--learning-rate", type=float, default=4e-3, help="highest learning rate")
    model.add_argument("--seed", type=int, default=1, help="of the first weights and the order of the data")
    where = parser.add_argument_group("machines")
    machines.add_options(where)
    where.add_argument(
        "--time-out",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds after which a hanging worker ends the job",
    )
    return parser


if __name__ == "__main__":
    parse()
