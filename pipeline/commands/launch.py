"""``python -m pipeline launch``: run a script of your own on several workers, watched.

Checks come first, each rank has a log, the first error is told on the terminal, and no process is left. Exit code 0
when every worker ended well, 2 when the job could not start, 1 when it failed on the way, 130 when it was interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pipeline.launch
from pipeline import machines
from pipeline.launch import Job, LaunchError, cluster_of, python_path

__all__ = ["add_arguments", "run"]

_WORKER = Path(pipeline.launch.__file__).with_name("launch_worker.py")
_SECONDS_BETWEEN_LOOKS = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="workers on this machine")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="folder for a log per rank (default logs)")
    machines.add_options(parser)
    parser.add_argument("script", type=Path, help="Python script that every worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the script")


def run(args: argparse.Namespace) -> int:
    """Run the job and return the exit code. The terminal shows what the last worker of this machine prints."""
    os.environ.setdefault("GLOG_v", "3")  # one sentence, and not MindSpore's warnings around it
    try:
        job = _prepare(args)
        job.start()
    except (ValueError, RuntimeError, ImportError) as error:
        print(f"cannot launch: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if _follow(job):
            return 0
        print(f"\nthe job failed: {job.failure()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nthe job was interrupted", file=sys.stderr)
        return 130
    finally:
        job.stop()


def _prepare(args: argparse.Namespace) -> Job:
    """See that everything is there that can be seen before a worker starts."""
    from hyper_parallel.platform.mindspore.environment import check_device, check_mindspore_version, device_target

    machines.check_options(args)
    if not args.script.is_file():
        raise LaunchError(f"there is no script {args.script}: give the path of a Python file")
    check_mindspore_version()
    check_device(device_target())
    cluster = cluster_of(args)
    path = python_path(_WORKER.parent.parent)
    command = [str(_WORKER), str(args.script.resolve()), *args.arguments]
    return Job(command, cluster, args.log_dir.resolve(), {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"})


def _follow(job: Job) -> bool:
    """Show the last local worker's output until the job ends; return whether it succeeded."""
    log, shown = job.log_of(job.cluster.local_rank_numbers[-1]), 0
    while True:
        outcome = job.poll()
        shown = _show(log, shown)
        if outcome is not None:
            return outcome
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _show(log: Path, start: int) -> int:
    """Print what a log has after a byte; return where it ends now."""
    if not log.exists():
        return start
    with log.open("rb") as file:
        file.seek(start)
        new = file.read()
    sys.stdout.write(new.decode(errors="replace"))
    sys.stdout.flush()
    return start + len(new)


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
