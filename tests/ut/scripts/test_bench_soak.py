"""What the soak bench makes of its samples."""

from __future__ import annotations

import pytest

from scripts.bench import soak


def samples(resident_per_step: float, **changes: list[int]) -> list[dict]:
    """Three samples, ten steps apart."""
    steady = {**{figure: [7, 7, 7] for figure in soak.FLAT}, "pending": [0, 0, 0], **changes}
    return [
        {"step": step, "resident_kib": 1000 + step * resident_per_step, **{name: steady[name][i] for name in steady}}
        for i, step in enumerate((0, 10, 20))
    ]


def test_growth_is_the_slope_of_the_resident_size() -> None:
    assert soak.growth(samples(2.5)) == pytest.approx(2.5)


def test_what_stays_as_it_is_is_not_told() -> None:
    assert soak.misses([samples(1.0), samples(1.0)], samples(3.0)) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tensors": [7, 8, 9]}, "rank 1: expected as many tensors after every step, saw [7, 8, 9]"),
        ({"pending": [2, 2, 2]}, "rank 1: expected no message under way between steps, saw 2"),
    ],
)
def test_what_grew_is_told(changes: dict, told: str) -> None:
    assert soak.misses([samples(1.0), samples(1.0, **changes)], samples(3.0)) == [told]


def test_more_resident_memory_than_one_process_is_told() -> None:
    (problem,) = soak.misses([samples(2.0), samples(2.0)], samples(3.0))
    assert problem.startswith("resident memory: 4.0 KiB per step on all ranks together, expected at most 3.2")
