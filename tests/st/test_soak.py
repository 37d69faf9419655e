"""Nothing grows from step to step: the soak bench, short. Resident memory takes its 500 steps to tell."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from scripts.bench import soak
from scripts.regression.cases import Case

pytestmark = pytest.mark.st


def test_counts_are_flat_on_every_rank(tmp_path: Path) -> None:
    options = Namespace(case=Case.parse(soak.CASE), steps=40, warm_up=10, every=20)
    ranks = soak.soak_workers(options, tmp_path)
    assert [len(samples) for samples in ranks] == [3] * 4
    assert [problem for rank, samples in enumerate(ranks) for problem in soak.grown(rank, samples)] == []
