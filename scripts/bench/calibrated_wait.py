"""Waiting until a moment, as exactly as a sleep allows. Imports neither torch nor MindSpore: both peers wait by it."""

from __future__ import annotations

import functools
import statistics
import time

_TRIAL = 0.002


@functools.cache
def lateness() -> float:
    """By how many seconds a sleep ends too late on this machine, the median of some."""
    late = []
    for _ in range(25):
        start = time.perf_counter()
        time.sleep(_TRIAL)
        late.append(time.perf_counter() - start - _TRIAL)
    return statistics.median(late)


def wait_until(moment: float) -> None:
    """Sleep until a moment of `time.perf_counter`."""
    time.sleep(max(0.0, moment - time.perf_counter() - lateness()))
