"""What device memory is alive, what the peak of a call is, and how many Tensor objects live.

One interface, `MemoryMeter`, with two ways behind it:

- CPU: MindSpore's counters stay at 0 there, and its pool never returns memory to the system. So the pool is filled with
  small tensors until the process grows: then it has no free block left, and what is alive is the resident size less the
  filling. With the pool kept full, the growth of the resident size during a call is the call's peak.
- Ascend: MindSpore's counters. Written from MindSpore's documentation, not yet run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import mindspore
import numpy as np
import psutil
from mindspore import Tensor

MIB = 2**20

PRIVATE_INTERFACES: tuple[str, ...] = ()


class MemoryMeter(Protocol):
    """Measures the memory of this process's device."""

    def alive_bytes(self) -> int:
        """Bytes in use now. Only differences between two calls in one process mean something."""

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        """Run `step` and return how many bytes its peak lies above what was in use before it."""


class FillingMeter:
    """The CPU way. Exact to about 0.3 MiB once the operators of the measured program have run once.

    A hole in the pool that is smaller than a filling block counts as alive, so blocks are small. A measurement counts
    everything that the process gains, so nothing else may allocate much while it runs.
    """

    _BLOCK = MIB // 4
    _BLOCKS_PER_LOOK = 32
    # The pool grows in steps of a few MiB: growth well past one step means that no free block was left.
    _ENOUGH_GROWTH = 24 * MIB

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._one_block = Tensor(np.zeros(self._BLOCK // 4, np.float32))

    def alive_bytes(self) -> int:
        filling = self._fill()
        return self._resident() - len(filling) * self._BLOCK

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        filling = self._fill()
        before = self._resident()
        step()
        growth = self._resident() - before
        filling.clear()
        return growth

    def _resident(self) -> int:
        return self._process.memory_info().rss

    def _fill(self) -> list[Tensor]:
        """Allocate blocks until the process has grown, and return them: they must be kept until the size is read."""
        gc.collect()
        filling: list[Tensor] = []
        enough = self._resident() + self._ENOUGH_GROWTH
        while self._resident() < enough:
            filling.extend(self._one_block + 1.0 for _ in range(self._BLOCKS_PER_LOOK))
        return filling


class CounterMeter:
    """The Ascend way: MindSpore's counters. Not yet run."""

    def alive_bytes(self) -> int:
        gc.collect()
        mindspore.runtime.synchronize()
        return mindspore.runtime.memory_allocated()

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        before = self.alive_bytes()
        mindspore.runtime.reset_max_memory_allocated()
        step()
        mindspore.runtime.synchronize()
        return mindspore.runtime.max_memory_allocated() - before


def memory_meter() -> MemoryMeter:
    """Return the meter for the current device target."""
    if mindspore.get_context("device_target") == "CPU":
        return FillingMeter()
    return CounterMeter()


def live_tensor_count() -> int:
    """Count the Tensor objects that Python can reach or that wait for their last reference, after a collection."""
    gc.collect()
    # Not isinstance(): it asks proxies whose object may be gone, and caches a weak reference for every type it sees.
    return sum(Tensor in type(candidate).__mro__ for candidate in gc.get_objects())
