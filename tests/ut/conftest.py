"""One-process tests: operators run on the calling thread, and the tests that run beside each other share the cores."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def launch_blocking() -> None:
    """Switch MindSpore to launch blocking before the first operator, which is far faster on few cores."""
    import mindspore

    from hyper_parallel.platform.mindspore.thread_pool import rest_when_idle

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    mindspore.runtime.launch_blocking()
    rest_when_idle()


@pytest.fixture
def words_of() -> Callable[[str], list[str]]:
    """Runs a program in a process of its own that nothing has prepared, and returns the words that it prints."""

    def run(program: str) -> list[str]:
        environment = {"PYTHONPATH": str(ROOT), "GLOG_v": "3", "PATH": ""}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout.split()

    return run
