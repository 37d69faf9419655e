"""How the ranks of a job meet: rank 0 opens the monitor, all connect to it and compare their plans and software."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore import communication
from pipeline.execution.faults import Failure, PipelineError, Place, Reporter, marked_row
from pipeline.execution.grid import RankGrid
from pipeline.execution.monitor import Monitor
from pipeline.execution.watch import Watch
from pipeline.plan import Plan

PROTOCOL = 1
"""Raised whenever ranks of two versions of this project would not understand each other."""


def meet(
    world: communication.World, plans: Sequence[Plan], grid: RankGrid, timeout: float, problem: str
) -> tuple[Watch, Monitor | None]:
    """Join the other ranks.

    Args:
        world: this worker's place.
        plans: the plans that the ranks run; the first one is compared.
        grid: which row each rank runs.
        timeout: longest time of one action, in seconds; also of the start.
        problem: why this rank cannot take part, or empty. All ranks learn it.

    Returns:
        this rank's watch, and on rank 0 the monitor. A rank that is alone has nobody to watch.

    Raises:
        PipelineError: a rank is missing, has a problem, or runs another plan or version.
    """
    reporter = Reporter(plans, grid)
    watch = Watch(world.rank, timeout, reporter)
    if world.size == 1:
        if problem:
            raise PipelineError(_problem(0, problem))
        return watch, None
    monitor = None
    here = [0, 0, 0, 0, 0]
    if world.rank == 0:
        address = _own_address()
        monitor = Monitor(
            address, world.size, timeout, lambda hellos: _difference(hellos, plans[0], reporter), reporter
        )
        here = [*map(int, address.split(".")), monitor.port]
    *parts, port = communication.broadcast(world, Tensor(np.asarray(here, np.int32)), 0).asnumpy().tolist()
    watch.connect((".".join(map(str, parts)), port), _hello(plans[0], grid.pipeline_rank(world.rank), problem))
    return watch, monitor


def _own_address() -> str:
    """The address under which the other machines of the job reach this one: that of the way to msrun's scheduler."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MS_SCHED_HOST", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])


def _hello(plan: Plan, row: int, problem: str) -> dict[str, Any]:
    return {
        "problem": problem,
        "versions": {"protocol": PROTOCOL, "mindspore": ms.__version__, "python": platform.python_version()},
        "plan": plan.name,
        "digest": plan.digest(),
        "row": [str(action) for action in plan.rows[row]] if row < plan.ranks else [],
    }


def _difference(hellos: dict[int, dict], plan: Plan, reporter: Reporter) -> Failure | None:
    """Why the ranks may not start together, None if they may."""
    for rank in sorted(hellos):
        if hellos[rank]["problem"]:
            return _problem(rank, hellos[rank]["problem"])
    for rank in sorted(hellos):
        ours, theirs = hellos[0]["versions"], hellos[rank]["versions"]
        if ours != theirs:
            cause = f"expected the versions of rank 0, {ours}, got {theirs}; install the same software everywhere"
            return reporter.failure(rank, Place(), cause)
    for rank in sorted(hellos):
        if hellos[rank]["digest"] != hellos[0]["digest"]:
            return _plan_difference(rank, hellos[rank], plan, reporter)
    return None


def _problem(rank: int, problem: str) -> Failure:
    return Failure(rank, f"rank {rank}, at the start: {problem}")


def _plan_difference(rank: int, hello: dict, plan: Plan, reporter: Reporter) -> Failure:
    """Where the plan of a rank leaves that of rank 0."""
    row = reporter.row_of(rank)
    ours, theirs = [str(action) for action in plan.rows[row]], hello["row"]
    position = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    cause = f"rank {rank}, at the start: its plan {hello['plan']!r} is not rank 0's {plan.name!r}"
    if ours == theirs:
        cause += ": its own row is the same, another row or the placement differs"
        return Failure(rank, f"{cause}; give all ranks the same plan\n{marked_row(plan, row, None)}")
    here = ours[position] if position < len(ours) else "the end"
    there = theirs[position] if position < len(theirs) else "the end"
    cause += f": action {position + 1} of its row is {there}, and {here} in rank 0's plan"
    marked = position if position < len(ours) else len(ours) - 1
    return Failure(rank, f"{cause}; give all ranks the same plan\n{marked_row(plan, row, marked)}")
