"""Every schedule, for every small size, recompute mode and split: valid, complete, free of deadlock.

Sends block until they are received. They are written out once for each order of the other actions at every size, and
for each recompute mode at a few.
"""

from __future__ import annotations

from collections import Counter

import pytest

from pipeline.plan import (
    SCHEDULES,
    Kind,
    Plan,
    PlanError,
    faults,
    insert_communication,
    insert_recompute,
    loop,
    make_plan,
    merge_backward,
    split_backward,
    v_shape,
)
from pipeline.plan.schedules import TAKES_VIRTUAL

MICRO_BATCHES = range(1, 25)
MODES = {
    "none": lambda plan: plan,
    "lazy": lambda plan: insert_recompute(plan, "lazy"),
    "prefire": lambda plan: insert_recompute(plan, "prefire"),
    "lead-2": lambda plan: insert_recompute(plan, "prefire", 2),
    "lead-5-last-1": lambda plan: insert_recompute(plan, "prefire", 5, 1),
}
SPLITS = {"as drawn": lambda plan: plan, "split": split_backward, "merged": merge_backward}


def assert_complete(plan: Plan, recomputed: bool) -> None:
    """Every chunk has one F, one B or I and W, and one R if asked for, on the rank of its stage."""
    count = Counter(
        (rank, part.stage, part.micro_batch, part.kind)
        for rank, row in enumerate(plan.rows)
        for action in row
        for part in action.parts
    )
    for stage in range(plan.stages):
        rank = plan.placement.rank_of(stage)
        for micro_batch in range(plan.micro_batches):
            forwards, replays, wholes, inputs, weights = (
                count.pop((rank, stage, micro_batch, kind), 0) for kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
            )
            assert (forwards, replays, wholes + inputs, inputs) == (1, int(recomputed), 1, weights)
    assert not count


@pytest.mark.parametrize("ranks", range(1, 9), ids="p={}".format)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_plan_is_valid_and_complete_and_runs_with_blocking_sends(schedule, ranks):
    for micro_batches in MICRO_BATCHES:
        drawn = make_plan(schedule, ranks, micro_batches)
        seen = set()
        for split in SPLITS:
            plan = SPLITS[split](drawn)
            if plan.rows in seen:
                continue
            seen.add(plan.rows)
            for mode in MODES:
                changed = MODES[mode](plan)
                what = (schedule, ranks, micro_batches, split, mode)
                assert_complete(changed, mode != "none")
                assert faults(changed) == [], what
            assert faults(insert_communication(plan)) == [], what


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recompute_runs_with_blocking_sends(schedule, mode, harm):
    """With the transfers written out, by the validator and by an interpreter of its own."""
    for ranks in (1, 2, 3, 5):
        for micro_batches in (1, 2, 5, 9):
            plan = insert_communication(MODES[mode](make_plan(schedule, ranks, micro_batches)))
            assert faults(plan) == []
            assert harm(plan) == ""


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", sorted(TAKES_VIRTUAL))
def test_any_number_of_stages_per_rank(schedule, virtual, harm):
    """Also with fewer micro-batches than ranks, and with a last group that is not whole."""
    for ranks in range(1, 5):
        for micro_batches in range(1, 10):
            plan = make_plan(schedule, ranks, micro_batches, virtual)
            assert plan.placement == loop(ranks, virtual)
            assert_complete(plan, recomputed=False)
            assert harm(insert_communication(plan)) == ""


def test_placements():
    assert make_plan("interleaved", 3, 4).placement.rank_by_stage == (0, 1, 2, 0, 1, 2)
    for schedule in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        assert make_plan(schedule, 3, 4).placement == v_shape(3)
        assert make_plan(schedule, 3, 4).placement.rank_by_stage == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("schedule", "rows"),
    [
        ("gpipe", ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2"]),
        ("1f1b", ["0F0,0F1,0B0,0F2,0B1,0B2", "1F0,1B0,1F1,1B1,1F2,1B2"]),
        (
            "interleaved",
            ["0F0,0F1,2F0,2F1,0F2,2B0,2B1,2F2,0B0,0B1,2B2,0B2", "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1B1,3F2,3B2,1B2"],
        ),
        ("bfs", ["0F0,0F1,0F2,2F0,2F1,2F2,2B0,2B1,2B2,0B0,0B1,0B2", None]),
        ("zb-h1", ["0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2", "1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2"]),
    ],
)
def test_rows_as_they_are_drawn(schedule, rows):
    drawn = make_plan(schedule, 2, 3).to_csv().splitlines()
    assert [row if wanted else None for row, wanted in zip(drawn, rows)] == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 3), "expected one of gpipe, .*, saw '2f2b'"),
        (("1f1b", 0, 3), "expected at least 1 for ranks, saw 0"),
        (("zb-v", 2, 0), "expected at least 1 for micro_batches, saw 0"),
        (("interleaved", 2, 3, 0), "expected at least 1 for virtual, saw 0"),
        (("zb-v", 2, 3, 3), "expected 2 stages per rank, which zb-v always has, saw 3"),
    ],
)
def test_wrong_sizes_are_told(arguments, message):
    with pytest.raises(PlanError, match=message):
        make_plan(*arguments)
