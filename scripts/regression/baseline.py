"""Compares a report with an earlier one.

Counts and chunks must not grow at all, bytes by no more than 5 %. Time is compared as the step's time over that of the
same model in one process, which the same job measured. It still moves with the machine's load: one case may take up to
three times its earlier ratio, and the median over all cases up to one and a half times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

COUNTS = ("block_runs", "excluded_runs")
BYTES_GROWTH = 1.05
CASE_TIME_GROWTH = 3.0
MEDIAN_TIME_GROWTH = 1.5

Report = Mapping[str, Any]


def regressions(report: Report, baseline: Report) -> list[str]:
    """What became worse since the baseline, one sentence each. Cases that only one of the two has are passed over."""
    earlier = {case["name"]: case for case in baseline["cases"] if case["outcome"] == "passed"}
    pairs = [(case, earlier[case["name"]]) for case in report["cases"] if case["name"] in earlier]
    found = [f"{now['name']}: {what}" for now, before in pairs for what in _worse(now, before)]
    growths = [_growth(now["figures"], before["figures"]) for now, before in pairs if now["figures"]]
    if growths and median(growths) > MEDIAN_TIME_GROWTH:
        found.append(
            f"all cases: the median step time over one process is {median(growths):.2f} times the baseline's, "
            f"expected at most {MEDIAN_TIME_GROWTH}"
        )
    return found


def _worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    if now["outcome"] != "passed":
        yield "it passed in the baseline and does not now"
    if not now["figures"]:
        return
    figures, old = now["figures"], before["figures"]
    for name in COUNTS:
        if figures[name] > old[name]:
            yield f"{name} grew from {old[name]:g} to {figures[name]:g}"
    for rank, (chunks, old_chunks) in enumerate(zip(figures["peak_chunks"], old["peak_chunks"])):
        if chunks > old_chunks:
            yield f"rank {rank}: chunks held at most grew from {old_chunks} to {chunks}"
    for rank, (size, old_size) in enumerate(zip(figures["peak_bytes"], old["peak_bytes"])):
        if size > old_size * BYTES_GROWTH:
            yield f"rank {rank}: bytes held at most grew from {old_size} to {size}, expected at most 5 % more"
    if _growth(figures, old) > CASE_TIME_GROWTH:
        yield (
            f"step time over one process grew from {old['time_ratio']:.2f} to {figures['time_ratio']:.2f}, "
            f"expected at most {CASE_TIME_GROWTH:g} times as much"
        )


def _growth(figures: Mapping[str, Any], old: Mapping[str, Any]) -> float:
    return figures["time_ratio"] / old["time_ratio"]
