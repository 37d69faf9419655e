"""Every schedule on four ranks against one process without checkpointing."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.plan import SCHEDULES

pytestmark = pytest.mark.st

CASES = [f"{name} prefire" for name in SCHEDULES] + ["gpipe lazy", "1f1b lazy"]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(execution: dict[int, Any], case: str) -> None:
    assert max(result["schedules"][case]["error"] for result in execution.values()) <= 1e-6


@pytest.mark.parametrize("case", CASES)
def test_the_mean_of_the_losses_is_the_loss_of_one_process(execution: dict[int, Any], case: str) -> None:
    found = [result["schedules"][case] for result in execution.values()]
    losses = [one["loss"] for one in found if one["loss"] is not None]
    assert losses == [pytest.approx(found[0]["wanted_loss"], rel=1e-6)]


@pytest.mark.parametrize("case", CASES)
def test_blocks_run_twice_and_excluded_regions_once(execution: dict[int, Any], case: str) -> None:
    for result in execution.values():
        assert result["schedules"][case]["block_runs"] == [2.0]
        assert result["schedules"][case]["excluded_runs"] == [1.0]


@pytest.mark.parametrize("case", CASES)
def test_the_trace_is_the_row_of_the_plan(execution: dict[int, Any], case: str) -> None:
    for result in execution.values():
        assert result["schedules"][case]["ran"] == result["schedules"][case]["row"]


@pytest.mark.parametrize("case", CASES)
def test_no_message_is_left(execution: dict[int, Any], case: str) -> None:
    assert [result["schedules"][case]["pending"] for result in execution.values()] == [0, 0, 0, 0]
