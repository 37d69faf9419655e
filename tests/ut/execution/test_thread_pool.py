"""What MindSpore's CPU threads do while they are idle: measured in a process of its own, as a pool is made once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hyper_parallel.platform.mindspore import thread_pool

PROGRAM = """
import os
import time
from pathlib import Path

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.environment import prepare_process

def pool_seconds():
    threads = [Path("/proc/self/task", thread) for thread in os.listdir("/proc/self/task")]
    pool = [thread for thread in threads if "Thread_" in (thread / "comm").read_text()]
    assert pool, "MindSpore's pool threads have other names now"
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in pool) / 1e9

def idle_seconds():
    for _ in range(100):
        y = Tensor(np.ones((4, 4), np.float32)) + 1.0
    assert y.asnumpy().sum() == 32.0
    before = pool_seconds()
    time.sleep(0.5)
    return pool_seconds() - before

for threads in ("2", "1"):
    os.environ["OMP_NUM_THREADS"] = threads
    prepare_process("CPU")
    print(idle_seconds())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads' CPU time from /proc")
def test_the_pool_of_a_worker_with_one_thread_sleeps_when_idle(words_of: Callable[[str], list[str]]) -> None:
    """CPU seconds of the pool's threads in the half second after some operators, with two threads and with one."""
    with_two_threads, with_one = map(float, words_of(PROGRAM))
    assert with_two_threads > 0.02 > with_one


def test_it_can_be_done_here() -> None:
    assert thread_pool.rest_when_idle() is True


@pytest.mark.parametrize("name", ["_ACTOR_MANAGER", "_POOL_CLASS", "_SPIN_LEAST"])
def test_without_a_name_in_the_library_nothing_is_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, name, "_ZN_no_such_name")
    assert thread_pool.rest_when_idle() is False


def test_without_the_library_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "_LIBRARY", Path("libno_such.so"))
    assert thread_pool.rest_when_idle() is False
