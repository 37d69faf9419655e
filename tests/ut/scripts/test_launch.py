"""Watching workers: a stand-in for msrun starts plain Python workers, so that each way to end can be produced."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import psutil
import pytest

from pipeline import launch
from pipeline.launch import Cluster, Job, LaunchError, check_port, free_port

MSRUN = """
    import os, subprocess, sys, time
    options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    script = next(i for i, a in enumerate(sys.argv) if i and not a.startswith("--"))
    workers = []
    for rank in range(int(options["local_worker_num"])):
        environment = dict(os.environ, MS_ROLE="MS_WORKER", RANK_ID=str(rank))
        log = open(os.path.join(options["log_dir"], f"worker_{rank}.log"), "w")
        workers.append(subprocess.Popen([sys.executable, *sys.argv[script:]], env=environment, stdout=log, stderr=log,
                                        start_new_session=True))
    while all(worker.poll() is None for worker in workers):
        time.sleep(0.01)
    first = next(worker for worker in workers if worker.poll() is not None)
    if first.returncode:
        print(f"Worker process {first.pid} exit with exception. Error code: {first.returncode}.", flush=True)
        if os.environ.get("KILL_OTHERS"):
            for worker in workers:
                worker.kill()
    for worker in workers:
        worker.wait()
    time.sleep(1000)
"""

Start = Callable[[str], Job]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    msrun = tmp_path / "msrun.py"
    msrun.write_text(textwrap.dedent(MSRUN))
    monkeypatch.setattr(launch, "msrun_program", lambda: str(msrun))
    jobs = []

    def begin(worker: str) -> Job:
        script = tmp_path / "worker.py"
        root = str(Path(launch.__file__).resolve().parent.parent)
        head = "import os, signal, sys, time\nfrom pipeline.launch import mark_failed, mark_finished\n"
        script.write_text(head + "rank = int(os.environ['RANK_ID'])\n" + textwrap.dedent(worker))
        job = Job([str(script)], Cluster(2, 2, port=free_port()), tmp_path / "logs", {"PYTHONPATH": root})
        jobs.append(job)
        job.start()
        return job

    yield begin
    for job in jobs:
        job.stop()
        assert not _left(job)


def _left(job: Job) -> list[psutil.Process]:
    return list(job._processes())


def _outcome(job: Job) -> Optional[bool]:
    for _ in range(600):
        outcome = job.poll()
        if outcome is not None:
            return outcome
        time.sleep(0.05)
    return None


def test_all_finished(start: Start) -> None:
    assert _outcome(start("mark_finished(rank)")) is True


def test_a_worker_tells_its_failure(start: Start) -> None:
    job = start(
        """
        if rank == 1:
            mark_failed(rank, ValueError("seven is too many"), stage=3, action="3B7")
        time.sleep(1000)
        """
    )
    assert _outcome(job) is False
    assert str(job.failure()).startswith("rank 1, stage 3, in action 3B7: ValueError: seven is too many")


def test_the_first_failure_is_the_cause(start: Start, tmp_path: Path) -> None:
    job = start("time.sleep(1000)")
    for rank, when, cause in ((0, 2.0, "Lost"), (1, 1.0, "Cause")):
        record = {"rank": rank, "stage": rank, "action": None, "cause": cause, "message": "m", "time": when}
        (tmp_path / "logs" / f"failure.rank{rank}.json").write_text(json.dumps(record))
    assert _outcome(job) is False
    assert job.failure().cause == "Cause"


def test_a_killed_worker_is_noticed(start: Start) -> None:
    job = start("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1000)")
    assert _outcome(job) is False
    failure = job.failure()
    assert failure.rank == 1 and failure.cause == "killed"


@pytest.mark.parametrize("rank", [0, 1])
def test_of_workers_found_gone_in_one_look_the_one_that_msrun_did_not_kill_is_told(
    rank: int, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL_OTHERS", "1")
    seen = tmp_path / "both seen"
    job = start(
        f"""
        while not os.path.exists({str(seen)!r}): time.sleep(0.01)
        if rank == {rank}: os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        """
    )
    while len(job._workers) < 2:
        assert job.poll() is None
    seen.write_text("")
    psutil.wait_procs([worker.process for worker in job._workers.values()], timeout=30)
    assert _outcome(job) is False
    assert job.failure().rank == rank and job.failure().cause == "killed"


def test_a_killed_worker_that_another_misses_is_told_with_its_signal(start: Start, tmp_path: Path) -> None:
    job = start(
        f"""
        while not os.path.exists({str(tmp_path / "both seen")!r}): time.sleep(0.01)
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        mark_failed(1, RuntimeError("rank 1, stage 5: gone"), stage=5, teller=0)
        time.sleep(1000)
        """
    )
    while len(job._workers) < 2:
        job.poll()
    (tmp_path / "both seen").write_text("")
    assert _outcome(job) is False
    assert str(job.failure()).startswith("rank 1, stage 5: gone\n  rank 1 was ended by SIGKILL (log: ")


def test_a_worker_that_raises_is_quoted(start: Start) -> None:
    job = start("if rank == 0: raise ZeroDivisionError('not by nought')\ntime.sleep(1000)")
    assert _outcome(job) is False
    failure = job.failure()
    assert (failure.rank, failure.cause, failure.message) == (0, "ZeroDivisionError", "not by nought")
    assert failure.log is not None and "nought" in failure.log.read_text()


def test_an_early_end_without_a_word(start: Start) -> None:
    job = start("sys.exit(3) if rank == 1 else time.sleep(1000)")
    assert _outcome(job) is False
    assert job.failure().rank == 1


def test_stop_ends_every_process(start: Start) -> None:
    job = start("import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']).wait()")
    while len(_left(job)) < 5:
        job.poll()
    job.stop()
    assert not _left(job)


def test_files_of_an_earlier_job_do_not_count(start: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "failure.rank0.json").write_text('{"rank": 0, "cause": "Old", "message": "", "time": 0}')
    assert _outcome(start("mark_finished(rank)")) is True


def test_msrun_that_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msrun.py").write_text("raise SystemExit('ValueError: bad master address')")
    monkeypatch.setattr(launch, "msrun_program", lambda: str(tmp_path / "msrun.py"))
    job = Job([sys.executable], Cluster(2, 2, port=free_port()), tmp_path / "logs")
    job.start()
    assert _outcome(job) is False
    assert "bad master address" in str(job.failure())
    job.stop()


def test_a_missing_msrun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_msrun", lambda: None)
    with pytest.raises(LaunchError, match="msrun was not found"):
        Job(["x.py"], Cluster(2, 2, port=free_port()), tmp_path).start()


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} .* choose another with --port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", free_port())
