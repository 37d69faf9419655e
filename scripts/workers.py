"""Runs a worker script of a bench or of the regression matrix under msrun, and the few words a worker says back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Optional

from pipeline.launch import Cluster, Failure, Job, free_port, mark_failed, mark_finished, python_path

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOG_v": "3"}
_SECONDS_BETWEEN_LOOKS = 0.1


def run_workers(
    script: Path,
    ranks: int,
    folder: Path,
    arguments: Sequence[str] = (),
    silence: float = 300.0,
    environment: Optional[Mapping[str, str]] = None,
    progress: Callable[[], int] = lambda: 0,
) -> Optional[Failure]:
    """Run a script on several ranks of this machine, one thread each, until all have finished or one has failed.

    Args:
        script: the worker script.
        ranks: how many workers.
        folder: where logs and answers go; the workers are told by their environment (`pipeline.launch`).
        arguments: for the script.
        silence: seconds without a change of `progress()` after which the job counts as hanging.
        environment: further variables for the workers.
        progress: a number that changes when the workers get on.

    Returns:
        The first failure, None if all is well. No process is left in any case.
    """
    variables = {**ONE_THREAD, "PYTHONPATH": python_path(ROOT), "PYTHONUNBUFFERED": "1", **(environment or {})}
    job = Job([str(script), *arguments], Cluster(ranks, ranks, port=free_port()), folder, variables)
    try:
        job.start()
        seen, since = progress(), time.monotonic()
        while True:
            state = job.poll()
            if state is not None:
                return None if state else job.failure()
            if progress() != seen:
                seen, since = progress(), time.monotonic()
            if time.monotonic() - since > silence:
                return Failure(None, "time-out", f"no worker got any further within {silence:.0f} s", log=folder)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    finally:
        job.stop()


def is_scheduler() -> bool:
    """Whether this process is msrun's scheduler, which runs the same script as the workers."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def hold_to_a_core() -> None:
    """Hold this process to one core: OMP_NUM_THREADS alone does not keep MindSpore's matmul from using more.

    A process that is no worker gets the last core, workers get one after the other, counted back from it.
    """
    from hyper_parallel.platform.mindspore.environment import worker_environment  # imports MindSpore, as workers do

    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0), reverse=True)
        os.sched_setaffinity(0, {cores[worker_environment().rank % len(cores)]})


@contextmanager
def reported(rank: int) -> Iterator[None]:
    """Tell the watching job how the work of this rank ended."""
    try:
        yield
    except BaseException as error:
        mark_failed(rank, error)
        raise
    mark_finished(rank)
