"""Starts worker processes with msrun, watches them, and leaves none behind.

1. The first thing that goes wrong ends the job: the rank, its stage, its action and the cause are the outcome.
2. A worker tells its own failure in ``failure.rank<N>.json`` in the log folder; a worker that can no longer do so (it
   was killed) is noticed by its absence: it is gone, and there is no ``finished.rank<N>``.
3. Every process of a job carries the job's mark in its environment, so that ``stop`` finds all of them, also those
   whose parent is gone. Only processes with that mark are ended.
4. When the launcher itself is killed, msrun is interrupted by the kernel and ends its workers (``start_msrun.py``).
5. msrun kills all workers in the moment in which it notices a lost one, be it at once or after a minute. So it is
   watched from outside, and started so that it lets the others say what they know (``platform/mindspore/msrun.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import psutil

from pipeline.machines import Cluster

__all__ = [
    "Cluster",
    "Failure",
    "Job",
    "LaunchError",
    "check_port",
    "cluster_of",
    "find_msrun",
    "free_port",
    "mark_failed",
    "mark_finished",
    "msrun_program",
    "python_path",
]

JOB_MARK = "PIPELINE_JOB"
LOG_DIR = "PIPELINE_LOG_DIR"

_START_MSRUN = Path(__file__).with_name("start_msrun.py")
_PATIENT_MSRUN = Path(__file__).parent.parent / "hyper_parallel" / "platform" / "mindspore" / "msrun.py"
_SECONDS_FOR_A_FAILURE_FILE = 3.0
_SECONDS_TO_BE_GONE = 1.0
_SECONDS_TO_END = 20.0
_ERROR_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)): (.*)$")
_EXIT_LINE = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")


class LaunchError(RuntimeError):
    """The job cannot be started; the message says what to change."""


@dataclass(frozen=True)
class Failure:
    """What went wrong first.

    Attributes:
        rank: the worker's rank, or None when no worker is to blame.
        cause: the kind of error.
        message: its text.
        stage: the stage the worker was at, if it said so.
        action: the action it was in, if it said so.
        log: file with the worker's whole output.
    """

    rank: Optional[int]
    cause: str
    message: str
    stage: Optional[int] = None
    action: Optional[str] = None
    log: Optional[Path] = None

    def __str__(self) -> str:
        log = f" (log: {self.log})" if self.log else ""
        if self.rank is not None and self.message.startswith(f"rank {self.rank}"):
            return self.message + log
        who = "the job" if self.rank is None else f"rank {self.rank}"
        where = "" if self.stage is None else f", stage {self.stage}"
        doing = f", in action {self.action}" if self.action else ""
        return f"{who}{where}{doing}: {self.cause}: {self.message}{log}"


def find_msrun() -> Optional[str]:
    """Return the path of msrun: the one beside this Python, else the first on PATH, else None."""
    beside = Path(sys.executable).parent / "msrun"
    return str(beside) if beside.exists() else shutil.which("msrun")


def msrun_program() -> str:
    """Return the program to start workers with: msrun, but one that lets workers say why they end.

    Raises:
        LaunchError: msrun is missing.
    """
    if find_msrun() is None:
        raise LaunchError("msrun was not found: install MindSpore in this Python, msrun comes with it")
    return str(_PATIENT_MSRUN)


def free_port() -> int:
    """Return a TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(address: str, port: int) -> None:
    """Raise ``LaunchError`` when the scheduler could not listen on ``address:port`` of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on {address} cannot be used ({error.strerror}): "
                "end what listens there, or choose another with --port"
            ) from error


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Return the machines that the options of ``machines.add_options`` describe, where the scheduler can listen.

    Raises:
        LaunchError: the port is in use on the first machine, which is this one.
    """
    cluster = Cluster.from_options(options, options.port or free_port())
    if cluster.node_rank == 0:
        check_port(cluster.master_addr, cluster.port)
    return cluster


def python_path(root: Path) -> str:
    """Return a ``PYTHONPATH`` for workers: a folder, then what there was."""
    return os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))


def mark_finished(rank: int) -> None:
    """Tell the watching launcher that this worker did all it had to do. The last call of a worker."""
    log_dir = os.environ.get(LOG_DIR)
    if log_dir:
        (Path(log_dir) / f"finished.rank{rank}").write_text("")


def mark_failed(
    rank: int,
    error: BaseException,
    stage: Optional[int] = None,
    action: Optional[str] = None,
    teller: Optional[int] = None,
) -> None:
    """Tell the watching launcher why this worker ends; what was told before is kept, it is nearer to the cause.

    Args:
        rank: the rank that failed.
        error: how.
        stage: the stage it was at.
        action: the action it was in.
        teller: the rank that tells it, if that is another one.
    """
    log_dir = os.environ.get(LOG_DIR)
    file = Path(log_dir or ".") / f"failure.rank{rank if teller is None else teller}.json"
    if not log_dir or file.exists():
        return
    record = {"rank": rank, "stage": stage, "action": action, "cause": type(error).__name__, "message": str(error)}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({**record, "time": time.time()}))
    temporary.replace(file)


@dataclass
class _Worker:
    """One worker as seen from outside."""

    rank: int
    process: psutil.Process
    gone_since: Optional[float] = None
    exit_status: Optional[int] = None

    def alive(self) -> bool:
        """Whether it still runs; of one that has just ended the exit status is read while it can be."""
        try:
            if self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE:
                return True
            self.exit_status = _zombie_status(self.process.pid)
        except psutil.NoSuchProcess:
            pass
        return False

    def gone_for(self) -> float:
        """Return for how many seconds it is known to have ended without being done; 0 while it is not."""
        return 0.0 if self.gone_since is None else time.monotonic() - self.gone_since


@dataclass
class Job:
    """A script run by several workers under msrun.

    Args:
        command: the script and its arguments.
        cluster: where the workers run.
        log_dir: folder for the workers' output; files of an earlier job in it are removed.
        environment: variables added to the workers' environment.
    """

    command: Sequence[str]
    cluster: Cluster
    log_dir: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._msrun: Optional[subprocess.Popen[bytes]] = None
        self._workers: dict[int, _Worker] = {}
        self._all_finished_since: Optional[float] = None

    def start(self) -> None:
        """Start msrun.

        Raises:
            LaunchError: msrun is missing, or the port cannot be used.
        """
        program = msrun_program()
        cluster = self.cluster
        if cluster.node_rank == 0:
            check_port(cluster.master_addr, cluster.port)
        self._clear_log_dir()
        options = {
            "worker_num": cluster.ranks,
            "local_worker_num": cluster.local_ranks,
            "master_addr": cluster.master_addr,
            "master_port": cluster.port,
            "log_dir": self.log_dir,
            "join": True,
            "cluster_time_out": cluster.start_time_out,
            "tail_worker_log": cluster.ranks,  # none: processes that follow the logs would outlive a killed msrun
        }
        if cluster.several_machines:
            options["node_rank"] = cluster.node_rank
        flags = [f"--{name}={value}" for name, value in options.items()]
        # msrun starts the "python" that it finds on PATH.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        threads = str(max(1, (os.cpu_count() or 1) // cluster.local_ranks))
        marks = {"PATH": path, JOB_MARK: self._mark, LOG_DIR: str(self.log_dir)}
        # Defaults that the user's environment overrides: a worker's share of the cores, and errors only in the logs.
        defaults = {"OMP_NUM_THREADS": threads, "GLOG_v": "3"}
        environment = {**defaults, **os.environ, **self.environment, **marks}
        with (self.log_dir / "msrun.log").open("wb") as log:
            self._msrun = subprocess.Popen(
                [sys.executable, str(_START_MSRUN), str(os.getpid()), program, *flags, *self.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def poll(self) -> Optional[bool]:
        """Return True when all workers of this machine finished, False when something failed, None while they work."""
        if self._msrun is None:
            raise LaunchError("the job was not started")
        self._find_workers()
        if self._failure_files():
            return False
        finished = self._finished()
        if all(rank in finished for rank in self.cluster.local_rank_numbers):
            return self._ended_after_all_finished()
        self._note_the_gone(finished)
        if any(worker.gone_for() > _SECONDS_FOR_A_FAILURE_FILE for worker in self._workers.values()):
            return False
        return None if self._msrun.poll() is None else False

    def failure(self) -> Failure:
        """Return what went wrong first; to be asked after ``poll`` returned False."""
        told = self._failure_files()
        if told:
            first = min(told, key=lambda record: record.get("time", 0.0))
            rank = first.get("rank")
            return Failure(
                rank,
                str(first.get("cause", "Error")),
                str(first.get("message", "")) + self._signal_of(rank),
                first.get("stage"),
                first.get("action"),
                self.log_of(rank),
            )
        lost = self._first_lost()
        return self._failure_of_msrun() if lost is None else self._failure_of_lost(lost)

    def stop(self) -> None:
        """End every process of this job that still runs. Safe to call at any time and more than once."""
        for _ in range(20):
            left = list(self._processes())
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if self._msrun is not None:
                self._msrun.poll()
            if not left:
                return
            psutil.wait_procs(left, timeout=0.5)

    def log_of(self, rank: Optional[int]) -> Path:
        """Return the file that holds a worker's output; msrun's own for None."""
        return self.log_dir / ("msrun.log" if rank is None else f"worker_{rank}.log")

    def _clear_log_dir(self) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for pattern in ("failure.rank*.json", "finished.rank*", "worker_*.log", "scheduler.log", "msrun.log"):
            for file in self.log_dir.glob(pattern):
                file.unlink()

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(JOB_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue

    def _find_workers(self) -> None:
        if len(self._workers) == self.cluster.local_ranks or self._msrun is None:
            return
        try:
            children = psutil.Process(self._msrun.pid).children()
        except psutil.NoSuchProcess:
            return
        for process in children:
            try:
                environment, command = process.environ(), process.cmdline()
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
            if self.command[0] not in command:
                continue  # what follows the logs for msrun has a worker's environment too
            if environment.get("MS_ROLE") == "MS_WORKER" and environment.get("RANK_ID", "").isdigit():
                rank = int(environment["RANK_ID"])
                self._workers.setdefault(rank, _Worker(rank, process))

    def _finished(self) -> set[int]:
        return {int(file.name[len("finished.rank") :]) for file in self.log_dir.glob("finished.rank*")}

    def _failure_files(self) -> list[dict[str, Any]]:
        found = []
        for file in self.log_dir.glob("failure.rank*.json"):
            try:
                found.append(json.loads(file.read_text()))
            except ValueError:
                continue
        return found

    def _note_the_gone(self, finished: set[int]) -> None:
        """Note which workers ended without being done. Their failure files are given a moment to appear."""
        now = time.monotonic()
        for worker in self._workers.values():
            if worker.rank in finished:  # maybe since the last look, in which it was gone already
                worker.gone_since = None
            elif worker.gone_since is None and not worker.alive():
                worker.gone_since = now

    def _first_lost(self) -> Optional[_Worker]:
        """Return the worker that was gone first. msrun then kills the others, maybe before the next look.

        Of those found gone in one look, it is the one that msrun names: its log tells only whom it did not kill itself.
        """
        lost = [worker for worker in self._workers.values() if worker.gone_since is not None]
        named = [int(match.group(1)) for match in _EXIT_LINE.finditer(_text_of(self.log_of(None)))]
        return min(lost, key=lambda w: (w.gone_since, w.process.pid not in named), default=None)

    def _ended_after_all_finished(self) -> Optional[bool]:
        """Wait for the workers to end by themselves. The scheduler takes longer, for nothing."""
        self._all_finished_since = self._all_finished_since or time.monotonic()
        waited = time.monotonic() - self._all_finished_since
        still_there = any(worker.alive() for worker in self._workers.values())
        return None if still_there and waited < _SECONDS_TO_END else True

    def _failure_of_lost(self, worker: _Worker) -> Failure:
        log = self.log_of(worker.rank)
        status = self._status_of(worker)
        error = _last_error(log)
        if status is not None and status < 0:
            cause = f"the worker was ended by {_signal_name(status)} from outside"
            return Failure(worker.rank, "killed", cause, log=log)
        if error:
            return Failure(worker.rank, *error, log=log)
        how = "" if status is None else f" with exit code {status}"
        return Failure(worker.rank, "ended early", f"the worker ended{how} without saying why", log=log)

    def _signal_of(self, rank: Optional[int]) -> str:
        """Return by which signal a worker that others miss was ended, as a line to add, or nothing.

        Others see its connections close a moment before it is gone.
        """
        worker = self._workers.get(-1 if rank is None else rank)
        deadline = time.monotonic() + _SECONDS_TO_BE_GONE
        while worker is not None and worker.alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        if worker is None or worker.alive():
            return ""
        status = self._status_of(worker)
        return "" if status is None or status >= 0 else f"\n  rank {rank} was ended by {_signal_name(status)}"

    def _status_of(self, worker: _Worker) -> Optional[int]:
        """Return the exit status of a worker that is gone, negative for a signal; None when it cannot be known."""
        if worker.exit_status is not None:
            return worker.exit_status
        for match in _EXIT_LINE.finditer(_text_of(self.log_of(None))):
            if int(match.group(1)) == worker.process.pid:
                return int(match.group(2))
        return None

    def _failure_of_msrun(self) -> Failure:
        for log in (self.log_dir / "scheduler.log", self.log_of(None)):
            error = _last_error(log)
            if error:
                return Failure(None, *error, log=log)
        code = None if self._msrun is None else self._msrun.poll()
        return Failure(None, "msrun ended", f"exit code {code} before any worker finished", log=self.log_of(None))


def _signal_name(status: int) -> str:
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


def _zombie_status(pid: int) -> Optional[int]:
    """Return the exit status of a process that ended and was not yet collected, negative for a signal."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    status = int(fields[-1])
    return -(status & 0x7F) if status & 0x7F else status >> 8


def _text_of(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _last_error(log: Path) -> Optional[tuple[str, str]]:
    """Return kind and text of the last Python error in a log."""
    found = None
    for line in _text_of(log).splitlines():
        match = _ERROR_LINE.match(line.strip())
        if match:
            found = (match.group(1), match.group(2))
    return found
