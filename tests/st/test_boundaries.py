"""What crosses stage boundaries, and what a schedule can do besides a plain step, on four ranks."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.st

TOLERANCE = 1e-6


def of_case(execution: dict[int, Any], case: str) -> list[dict]:
    """What each rank found."""
    return [execution[rank]["boundaries"][case] for rank in sorted(execution)]


def test_shapes_change_between_steps_with_evaluations_between(execution: dict[int, Any]) -> None:
    for found in of_case(execution, "changing_shapes"):
        for step in found["steps"]:
            assert step["error"] <= TOLERANCE
            assert step["means"] == [pytest.approx(step["loss"], rel=1e-6)] * 2
        assert found["pending"] == 0


def test_many_kinds_of_values_cross_a_boundary(execution: dict[int, Any]) -> None:
    ranks = of_case(execution, "mixed_values")
    for rank, found in enumerate(ranks):
        assert found["error"] <= TOLERANCE
        assert found["dtypes"] == found["wanted_dtypes"]
        assert found["values"] == [[[0, 1, 0], [1, 0, 1]]] * len(found["dtypes"])
        assert found["rest"] == [None, "words", [1.5, [True, 2]], [0, 3]]
        if rank:
            assert found["counts"] == [first + rank for first in found["first_counts"]]
    assert len(set(ranks[0]["first_counts"])) == 2, "the number must differ between micro-batches"
    assert ranks[-1]["results"] == [["count", "extra", "loss"]] * 4


def test_an_output_without_gradient(execution: dict[int, Any]) -> None:
    assert max(found["error"] for found in of_case(execution, "unused_output")) <= TOLERANCE


@pytest.mark.parametrize("schedule", ["Schedule1F1B", "ScheduleZBV"])
def test_shared_parameters_start_equal_and_get_the_summed_gradient(execution: dict[int, Any], schedule: str) -> None:
    found = [one[schedule] for one in of_case(execution, "shared_parameters")]
    assert max(one["error"] for one in found) <= TOLERANCE
    values = [value for one in found for value in one["values"]]
    assert len(values) == 2 and values[0] == values[1]


def test_several_runs_before_one_step_and_the_loss_scale(execution: dict[int, Any]) -> None:
    for found in of_case(execution, "several_runs"):
        assert max(found.values()) <= TOLERANCE


def test_pipeline_times_data(execution: dict[int, Any]) -> None:
    for found in of_case(execution, "pipeline_times_data"):
        assert found["error"] <= TOLERANCE
        assert found["pending"] == 0


def test_hooks_are_called_for_overlapped_pairs(execution: dict[int, Any]) -> None:
    for found in of_case(execution, "hooks"):
        assert found["called"] == found["pairs"] != []
        assert found["error"] <= TOLERANCE


def test_a_rank_with_another_plan_is_named_to_all(execution: dict[int, Any]) -> None:
    messages = {found["message"] for found in of_case(execution, "other_plan")}
    assert len(messages) == 1
    message = messages.pop()
    assert "rank 1, at the start: its plan 'gpipe' is not rank 0's '1f1b'" in message
    assert ">>" in message.splitlines()[1]


def test_a_rank_with_the_wrong_stage_is_named_to_all(execution: dict[int, Any]) -> None:
    messages = {found["message"] for found in of_case(execution, "wrong_stage")}
    assert len(messages) == 1
    assert "rank 2, at the start: expected stages [2] of 4" in messages.pop()


@pytest.mark.parametrize("source", ["from_csv", "from_auto"])
def test_a_plan_without_a_name(execution: dict[int, Any], source: str) -> None:
    for found in of_case(execution, source):
        assert found["error"] <= TOLERANCE
        assert found["ran"] == found["row"]
