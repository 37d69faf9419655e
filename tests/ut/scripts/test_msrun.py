"""msrun that lets the workers of a failed job say why they end, before it kills what is left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyper_parallel.platform.mindspore import msrun

Start = Callable[[str], subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    processes = []

    def begin(code: str) -> subprocess.Popen:
        processes.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def _manager(*workers: subprocess.Popen) -> msrun.PatientManager:
    manager = msrun.PatientManager.__new__(msrun.PatientManager)
    manager.cgn_processes, manager.tail_cgn_processes, manager.msn_process = list(workers), [], workers[0]
    return manager


def test_a_worker_that_ends_by_itself_is_waited_for(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    lost = start("raise SystemExit(1)")
    lost.wait()
    other = start(f"import os\nwhile not os.path.exists({str(go)!r}): pass")
    asked = []
    manager = _manager(lost, other)
    other.poll = lambda: (asked.append(go.write_text("")), subprocess.Popen.poll(other))[1]
    manager.kill_worker_processes()
    assert asked and other.wait() == 0


def test_one_that_does_not_end_is_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msrun, "SECONDS_TO_END", 0.2)
    stays = start("import time; time.sleep(1000)")
    _manager(stays).kill_worker_processes()
    assert stays.wait() == -signal.SIGKILL


def test_an_interrupted_msrun_does_not_wait(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msrun, "SECONDS_TO_END", 1000.0)
    stays = start("import time; time.sleep(1000)")
    _manager(stays).kill_all_processes()
    assert stays.wait() == -signal.SIGKILL
