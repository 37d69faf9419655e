"""The memory meter sees what is kept, what is dropped and what was only needed for a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mindspore import Tensor

from hyper_parallel.platform.mindspore.memory import CounterMeter, FillingMeter, live_tensor_count, memory_meter

MIB = 2**20
ROOT = Path(__file__).parents[3]

PROGRAM = """
import mindspore, numpy as np
from mindspore import Tensor, mint
from hyper_parallel.platform.mindspore.memory import memory_meter
mindspore.set_device("CPU")
mindspore.runtime.launch_blocking()
meter = memory_meter()
source = Tensor(np.ones((1024, 1024), np.float32))
kept = []
def keep(): kept.append(mint.exp(source))
def chain(): mint.exp(mint.exp(source))
keep(); kept.clear()
figures = [meter.alive_bytes()]
for _ in range(3):
    keep()
    figures.append(meter.alive_bytes())
kept.pop()
figures.append(meter.alive_bytes())
figures.append(figures[0] + meter.peak_bytes(chain))
figures.append(figures[0] + meter.peak_bytes(keep))
figures.append(meter.alive_bytes())
print("figures", *[figure - figures[0] for figure in figures])
"""


@pytest.fixture(scope="module")
def figures() -> list[float]:
    """Run the program in a process of its own, as other tests' tensors would move the resident size."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("figures"))
    return [int(word) / MIB for word in line.split()[1:]]


def test_alive_counts_what_is_kept(figures: list[float]) -> None:
    assert figures[:4] == pytest.approx([0, 4, 8, 12], abs=1)


def test_alive_falls_when_a_tensor_is_dropped(figures: list[float]) -> None:
    assert figures[4] == pytest.approx(8, abs=1)


def test_peak_counts_what_was_alive_for_a_moment(figures: list[float]) -> None:
    two_tensors, one_tensor = figures[5:7]
    assert two_tensors == pytest.approx(8, abs=1)
    assert one_tensor == pytest.approx(4, abs=1)
    assert figures[7] == pytest.approx(12, abs=1)


def test_the_device_decides_the_meter() -> None:
    assert isinstance(memory_meter(), FillingMeter)


@pytest.mark.ascend
@pytest.mark.skip(reason="needs an Ascend NPU: MindSpore's memory counters stay at 0 elsewhere")
def test_counters_on_ascend() -> None:
    assert CounterMeter().alive_bytes() > 0


def test_live_tensors_are_counted_one_by_one() -> None:
    before = live_tensor_count()
    kept = [Tensor([1.0]) for _ in range(5)]
    assert live_tensor_count() == before + 5
    kept.clear()
    assert live_tensor_count() == before
