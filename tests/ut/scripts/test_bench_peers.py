"""The peers bench: its cases, its figures, and that it tells when this project misses a limit."""

from __future__ import annotations

import pytest

from scripts.bench import peers
from scripts.bench.peer_case import Case


def steps_of(seconds: dict[Case, float], runs: float) -> dict:
    return {
        ("this project", case.name): [{"seconds": value, "runs": [runs], "loss": None}] * 3
        for case, value in seconds.items()
    }


def row(case: Case, seconds: float, runs: float = 2.0) -> dict:
    base = Case("1F1B", "none", case.compute)
    return peers.row("this project", case, steps_of({base: 1.0, case: seconds}, runs), {})


def test_each_peer_runs_every_schedule_in_every_mode_that_it_has():
    assert len(peers.cases("torch", "mlp")) == 6
    assert len(peers.cases("this project", "mlp")) == 9
    assert not any(case.checkpoint == "exclude" for case in peers.cases("this project", "wait"))


def test_figures_are_over_own_1f1b_without_checkpointing():
    figures = row(Case("ZB-V", "full", "mlp"), 1.3)
    assert figures["over own 1F1B"] == 1.3 and figures["block runs"] == "2"


@pytest.mark.parametrize(
    ("case", "seconds", "runs", "told"),
    [
        (Case("ZB-V", "full", "mlp"), 1.41, 2.0, "ZB-V, full, mlp: 1.41 times own 1F1B"),
        (Case("ZB-H1", "exclude", "mlp"), 1.26, 2.0, "expected at most 1.25"),
        (Case("ZB-H1", "full", "mlp"), 1.1, 4.0, "each block ran 4 times, expected exactly 2"),
        (Case("ZB-V", "full", "wait"), 1.1, 3.0, "ZB-V, full, wait: each block ran 3 times"),
    ],
)
def test_what_misses_a_limit_is_told(case, seconds, runs, told):
    assert any(told in text for text in peers.misses([row(case, seconds, runs)]))


@pytest.mark.parametrize(
    "case", [Case("ZB-V", "full", "mlp"), Case("1F1B", "full", "mlp"), Case("ZB-H1", "full", "dense")]
)
def test_what_is_within_the_limits_is_not_told(case):
    assert list(peers.misses([row(case, 1.39)])) == []


def test_a_torch_rank_that_fails_is_told_with_its_log(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = 0 ] || exec sleep 600\necho broken\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"torch's rank 0 failed[^\n]*\nbroken"):
        peers._run_torch(str(python), [], tmp_path)
