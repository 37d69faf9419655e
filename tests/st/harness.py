"""Runs a worker script under msrun and returns what its ranks wrote.

Every job gets a free port and its own log folder. When it fails or takes too long, every rank's log is in the error.
All its processes are ended in any case, also those whose parent is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from pipeline.launch import Cluster, Failure, Job, free_port, python_path

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
TAIL = 40
SMALL_JOB = (
    *("--layers", "4", "--width", "32", "--expert-width", "32", "--length", "32"),
    *("--batch", "8", "--micro-batches", "4"),
)
"""Options that make the training job small."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONUNBUFFERED": "1"}


class Outcome(NamedTuple):
    """How a job ended.

    Attributes:
        results: what each rank wrote with `write_result`, by rank; ranks that wrote nothing are missing.
        failure: the first thing that went wrong, None if nothing did.
        seconds: how long the job took.
        log_dir: where the logs are.
    """

    results: dict[int, Any]
    failure: Optional[Failure]
    seconds: float
    log_dir: Path

    def logs(self) -> str:
        """The last lines of every rank's log."""
        parts = []
        for log in sorted(self.log_dir.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-TAIL:]
            parts.append(f"--- {log.name}\n" + "\n".join(lines))
        return "\n".join(parts)


def run_job(
    script: str,
    ranks: int,
    log_dir: Path,
    arguments: Sequence[str] = (),
    timeout: float = 120.0,
    environment: Optional[Mapping[str, str]] = None,
    settle: float = 0.0,
) -> Outcome:
    """Run a script of `tests/st/workers` on several ranks until it ends, fails, or `timeout` seconds are over.

    Args:
        script: the file's name.
        ranks: how many workers.
        log_dir: an empty folder.
        arguments: for the script.
        timeout: seconds, start-up included.
        environment: variables for the workers.
        settle: seconds that the ranks get to end by themselves after the first failure.
    """
    cluster = Cluster(ranks, ranks, port=free_port())
    job = Job(
        [str(WORKERS / script), *arguments],
        cluster,
        log_dir,
        {**ENVIRONMENT, "PYTHONPATH": python_path(ROOT), **(environment or {})},
    )
    started = time.monotonic()
    try:
        job.start()
        state = None
        while state is None and time.monotonic() - started < timeout:
            time.sleep(0.1)
            state = job.poll()
        if state is False:
            time.sleep(settle)
        seconds = time.monotonic() - started
        failure = None
        if state is None:
            failure = Failure(None, "time-out", f"the job was not done after {timeout:.0f} s")
        elif state is False:
            failure = job.failure()
    finally:
        job.stop()
    return Outcome(_results(log_dir), failure, seconds, log_dir)


def run_ok(script: str, ranks: int, log_dir: Path, **options: Any) -> dict[int, Any]:
    """Run a script that must succeed on every rank; returns what the ranks wrote."""
    outcome = run_job(script, ranks, log_dir, **options)
    if outcome.failure is not None or len(outcome.results) != ranks:
        raise AssertionError(f"{script} failed after {outcome.seconds:.0f} s: {outcome.failure}\n{outcome.logs()}")
    return outcome.results


def write_result(rank: int, result: Any) -> None:
    """Called by a worker: hand a JSON value to the test."""
    file = Path(os.environ["PIPELINE_LOG_DIR"]) / f"result.rank{rank}.json"
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(result))
    temporary.replace(file)


def is_scheduler() -> bool:
    """Whether this process is msrun's scheduler, which runs the same script."""
    return os.environ.get("MS_ROLE") == "MS_SCHED"


def _results(log_dir: Path) -> dict[int, Any]:
    return {
        int(file.stem[len("result.rank") :]): json.loads(file.read_text()) for file in log_dir.glob("result.rank*.json")
    }
