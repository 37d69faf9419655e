"""What is told when a rank cannot go on."""

from __future__ import annotations

from pipeline.execution.faults import Place, Reporter, marked_row
from pipeline.execution.grid import RankGrid
from pipeline.plan import insert_communication, make_plan

PLAN = insert_communication(make_plan("1f1b", 4, 8))


def test_the_place_is_marked_and_its_surroundings_are_shown() -> None:
    row = [str(action) for action in PLAN.rows[1]]
    text = marked_row(PLAN, 1, 10)
    assert text == f"  row 1 of plan 1f1b: ... {' '.join(row[4:10])} >>{row[10]}<< {' '.join(row[11:17])} ..."


def test_at_the_ends_nothing_is_left_out() -> None:
    assert marked_row(PLAN, 0, 0).startswith(f"  row 0 of plan 1f1b: >>{PLAN.rows[0][0]}<< ")
    assert marked_row(PLAN, 0, len(PLAN.rows[0]) - 1).endswith(f">>{PLAN.rows[0][-1]}<<")


def test_a_failure_names_rank_stage_action_and_cause() -> None:
    reporter = Reporter([PLAN], RankGrid(4, 2))
    action = PLAN.rows[2][3]
    failure = reporter.failure(5, Place(0, 3, True), "no luck")
    assert failure.message.splitlines()[0] == f"rank 5, stage 2, action {action} (4 of {len(PLAN.rows[2])}): no luck"
    assert failure.message.splitlines()[1] == marked_row(PLAN, 2, 3)
    assert (failure.rank, failure.stage, failure.action) == (5, 2, str(action))


def test_a_failure_between_two_steps() -> None:
    failure = Reporter([PLAN], RankGrid(4)).failure(3, Place(0, None, False, "between two steps"), "gone")
    assert failure.message.startswith("rank 3, between two steps: gone\n  row 3 of plan 1f1b: ")
    assert (failure.stage, failure.action) == (None, None)
