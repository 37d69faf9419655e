"""Wrong plans are rejected, with rank, position, action and reason. Each is a right plan with one thing changed."""

from __future__ import annotations

from typing import Callable, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.plan import (
    SCHEDULES,
    Action,
    Kind,
    Plan,
    PlanError,
    faults,
    insert_communication,
    insert_recompute,
    make_plan,
    split_backward,
    validate,
)

Rows = list[list[str]]


def right(schedule: str, ranks: int = 2, micro_batches: int = 3) -> Plan:
    return make_plan(schedule, ranks, micro_batches)


PLANS: dict[str, Callable[[], Plan]] = {
    "1f1b": lambda: right("1f1b"),  # 0F0,0F1,0B0,0F2,0B1,0B2 / 1F0,1B0,1F1,1B1,1F2,1B2
    "split": lambda: split_backward(right("1f1b")),  # 1F0,1I0,1W0,1F1,...
    "prefire": lambda: insert_recompute(right("1f1b"), "prefire"),  # 1F0,1R0,1B0,1F1,...
    "sent": lambda: insert_communication(right("1f1b")),  # see test_the_right_plans_are_right
    "v": lambda: right("zb-v", 2, 4),
    "sent v": lambda: insert_communication(right("zb-v", 2, 4)),
    "pairs": lambda: right("dualpipe-v", 2, 4),
}


def delete(rank: int, action: str) -> Callable[[Rows], None]:
    return lambda rows: rows[rank].remove(action)


def insert(rank: int, position: int, action: str) -> Callable[[Rows], None]:
    return lambda rows: rows[rank].insert(position, action)


def replace(rank: int, old: str, new: str) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[rank][rows[rank].index(old)] = new

    return change


def move(rank: int, action: str, position: int) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        rows[rank].remove(action)
        rows[rank].insert(position, action)

    return change


def each(*changes: Callable[[Rows], None]) -> Callable[[Rows], None]:
    def change(rows: Rows) -> None:
        for one in changes:
            one(rows)

    return change


class Broken(NamedTuple):
    """A right plan, what is changed in it, and the fault to be found."""

    name: str
    plan: str
    change: Callable[[Rows], None]
    rank: int
    position: int
    action: str
    reason: str


BROKEN = [
    # Missing.
    Broken("a forward is missing", "1f1b", delete(0, "0F2"), 0, 5, "0F2", "is missing"),
    Broken("a backward is missing", "1f1b", delete(1, "1B2"), 1, 5, "1B2", "is missing"),
    Broken("a dx is missing", "split", delete(0, "0I2"), 0, 8, "0I2", "is missing"),
    Broken("a dw is missing", "split", delete(1, "1W0"), 1, 8, "1W0", "is missing"),
    Broken(
        "a chunk is missing: F",
        "v",
        each(delete(0, "3F1"), delete(0, "3I1"), delete(0, "3W1")),
        0,
        21,
        "3F1",
        "is missing",
    ),
    Broken("half a pair is missing", "pairs", replace(1, "(2F2;1B0)OVERLAP_F_B", "2F2"), 1, 15, "1B0", "is missing"),
    Broken("a send is missing", "sent", delete(0, "0SEND_F1"), 0, 11, "0SEND_F1", "is missing"),
    Broken("a receive is missing", "sent", delete(1, "1RECV_F2"), 1, 11, "1RECV_F2", "is missing"),
    Broken("a gradient's send is missing", "sent", delete(1, "1SEND_B0"), 1, 11, "1SEND_B0", "is missing"),
    Broken("a gradient's receive is missing", "sent", delete(0, "0RECV_B2"), 0, 11, "0RECV_B2", "is missing"),
    # Doubled.
    Broken("a forward twice", "1f1b", insert(0, 2, "0F1"), 0, 2, "0F1", "0F1 is there twice"),
    Broken("a backward twice", "1f1b", insert(1, 6, "1B2"), 1, 6, "1B2", "1B2 is there twice"),
    Broken("a dw twice", "split", insert(1, 3, "1W0"), 1, 3, "1W0", "1W0 is there twice"),
    Broken("a recompute twice", "prefire", insert(1, 2, "1R0"), 1, 2, "1R0", "1R0 is there twice"),
    Broken(
        "a whole backward and a dx",
        "1f1b",
        insert(1, 2, "1I0"),
        1,
        2,
        "1I0",
        "the backward of the chunk is there twice, as B and as I",
    ),
    Broken(
        "a dx and a whole backward",
        "split",
        replace(1, "1W0", "1B0"),
        1,
        2,
        "1B0",
        "the backward of the chunk is there twice, as I and as B",
    ),
    Broken(
        "a dw after a whole backward",
        "1f1b",
        insert(1, 2, "1W0"),
        1,
        2,
        "1W0",
        "the full backward has made the weight gradients already",
    ),
    Broken("a send twice", "sent", insert(0, 2, "0SEND_F0"), 0, 2, "0SEND_F0", "0SEND_F0 is there twice"),
    Broken("a receive twice", "sent", insert(1, 1, "1RECV_F0"), 1, 1, "1RECV_F0", "1RECV_F0 is there twice"),
    # Out of range, or on the wrong rank.
    Broken(
        "no such stage", "1f1b", replace(1, "1F2", "2F2"), 1, 4, "2F2", "stage 2 is out of range, the plan has 2 stages"
    ),
    Broken(
        "no such micro-batch",
        "1f1b",
        replace(0, "0B2", "0B3"),
        0,
        5,
        "0B3",
        "micro-batch 3 is out of range, the plan has 3",
    ),
    Broken("another rank's stage", "1f1b", insert(1, 0, "0F0"), 1, 0, "0F0", "stage 0 belongs to rank 0"),
    Broken(
        "another rank's stage in a pair",
        "pairs",
        insert(0, 0, "(2F2;1B0)OVERLAP_F_B"),
        0,
        0,
        "(2F2;1B0)OVERLAP_F_B",
        "stage 2 belongs to rank 1",
    ),
    Broken(
        "a send from the last stage", "sent", insert(1, 2, "1SEND_F0"), 1, 2, "1SEND_F0", "stage 1 has no neighbour"
    ),
    Broken(
        "a receive by the first stage", "sent", insert(0, 0, "0RECV_F0"), 0, 0, "0RECV_F0", "stage 0 has no neighbour"
    ),
    Broken(
        "a send within a rank",
        "sent v",
        insert(1, 5, "1SEND_F0"),
        1,
        5,
        "1SEND_F0",
        "stages 1 and 2 are on the same rank",
    ),
    # Order within a chunk.
    Broken("a backward before its forward", "1f1b", move(1, "1B0", 0), 1, 0, "1B0", "comes before the forward 1F0"),
    Broken("a dx before its forward", "split", move(1, "1I1", 1), 1, 1, "1I1", "comes before the forward 1F1"),
    Broken("a dw before its dx", "split", move(1, "1W0", 1), 1, 1, "1W0", "comes before its dx 1I0"),
    Broken("a recompute before its forward", "prefire", move(1, "1R0", 0), 1, 0, "1R0", "comes before the forward 1F0"),
    Broken(
        "a recompute after its backward",
        "prefire",
        move(1, "1R0", 2),
        1,
        2,
        "1R0",
        "a recompute after its backward 1B0",
    ),
    Broken(
        "a chunk overlaps with itself",
        "1f1b",
        each(delete(1, "1B0"), replace(1, "1F0", "(1F0;1B0)OVERLAP_F_B")),
        1,
        0,
        "(1F0;1B0)OVERLAP_F_B",
        "a chunk cannot overlap with itself",
    ),
    # Order of transfers and what they carry.
    Broken(
        "sent before it is made", "sent", move(0, "0SEND_F0", 0), 0, 0, "0SEND_F0", "is sent before it is made by 0F0"
    ),
    Broken(
        "received after it is needed",
        "sent",
        move(1, "1RECV_F0", 1),
        1,
        1,
        "1RECV_F0",
        "is received after it is needed by 1F0",
    ),
    Broken(
        "a gradient sent too early",
        "sent",
        move(1, "1SEND_B0", 1),
        1,
        1,
        "1SEND_B0",
        "is sent before it is made by 1B0",
    ),
    Broken(
        "a gradient received too late",
        "sent",
        move(0, "0RECV_B2", 11),
        0,
        11,
        "0RECV_B2",
        "is received after it is needed by 0B2",
    ),
    # Deadlocks.
    Broken(
        "each waits for what the other does next",
        "1f1b",
        each(move(0, "0B0", 1), move(1, "1B0", 2)),
        0,
        1,
        "0B0",
        "deadlock: waits for the gradient of micro-batch 0 from stage 1 on rank 1, which is at position 1 with 1F1",
    ),
    Broken(
        "the last rank wants what is sent last",
        "1f1b",
        move(1, "1F2", 0),
        1,
        0,
        "1F2",
        "deadlock: waits for the forward of micro-batch 2 from stage 0 on rank 0, which is at position 2 with 0B0",
    ),
    Broken(
        "a cycle through the V",
        "v",
        move(0, "0I0", 4),
        0,
        4,
        "0I0",
        "deadlock: waits for the gradient of micro-batch 0 from stage 1 on rank 1, which is at position 4 with 2I0",
    ),
    Broken(
        "half a pair is there twice",
        "pairs",
        replace(0, "3B3", "(3F3;0B1)OVERLAP_F_B"),
        0,
        11,
        "(3F3;0B1)OVERLAP_F_B",
        "3F3 is there twice",
    ),
    Broken(
        "two sends meet",
        "sent",
        each(move(0, "0F2", 4), move(0, "0SEND_F2", 5)),
        0,
        5,
        "0SEND_F2",
        "deadlock: waits for 1RECV_F2 on rank 1, which is at position 4 with 1SEND_B0",
    ),
    Broken(
        "two receives meet",
        "sent",
        move(0, "0SEND_F1", 11),
        0,
        3,
        "0RECV_B0",
        "deadlock: waits for 1SEND_B0 on rank 1, which is at position 2 with 1RECV_F1",
    ),
    Broken(
        "receives in another order than sends",
        "sent",
        move(1, "1RECV_F1", 0),
        1,
        0,
        "1RECV_F1",
        "deadlock: waits for 0SEND_F1 on rank 0, which is at position 1 with 0SEND_F0",
    ),
]


def changed(plan: Plan, change: Callable[[Rows], object]) -> Plan:
    rows = [[str(action) for action in row] for row in plan.rows]
    change(rows)
    return plan.replace(rows=tuple(tuple(map(Action.parse, row)) for row in rows))


@pytest.mark.parametrize("name", PLANS)
def test_the_right_plans_are_right(name, harm):
    plan = PLANS[name]()
    assert faults(plan) == []
    assert validate(plan) is plan
    assert harm(plan) == ""


@pytest.mark.parametrize("broken", BROKEN, ids=[broken.name for broken in BROKEN])
def test_a_broken_plan_is_rejected_at_its_place(broken, harm):
    plan = changed(PLANS[broken.plan](), broken.change)
    found = faults(plan)
    places = [(fault.rank, fault.position, str(fault.action)) for fault in found]
    assert (broken.rank, broken.position, broken.action) in places, found
    assert broken.reason in found[places.index((broken.rank, broken.position, broken.action))].reason
    assert harm(plan), "the second opinion sees nothing wrong"
    with pytest.raises(PlanError, match=f"expected a plan that can run, saw {len(found)} fault"):
        validate(plan)


def test_the_broken_plans_are_at_least_thirty_of_all_kinds():
    assert len({broken.name for broken in BROKEN}) == len(BROKEN) >= 30


def test_every_fault_is_told_with_its_place_and_the_rest_counted():
    plan = make_plan("1f1b", 2, 30)
    with pytest.raises(PlanError) as raised:
        validate(plan.replace(rows=(plan.rows[0], ())))
    lines = str(raised.value).splitlines()
    assert lines[0] == "expected a plan that can run, saw 60 faults in '1f1b':"
    assert lines[1] == "rank 1, position 0, 1F0: is missing"
    assert lines[-1] == "and 40 more"


def test_a_stray_action_does_not_hide_what_is_missing():
    plan = changed(make_plan("1f1b", 2, 3), each(replace(0, "0B2", "0B3"), delete(1, "1B1"), insert(1, 0, "0F0")))
    assert [(fault.rank, fault.position, str(fault.action)) for fault in faults(plan)] == [
        (0, 5, "0B3"),
        (0, 6, "0B2"),
        (1, 0, "0F0"),
        (1, 6, "1B1"),
    ]


def test_as_many_rows_as_ranks():
    plan = make_plan("1f1b", 2, 3)
    with pytest.raises(PlanError, match=r"expected 2 rows \(the placement's ranks\), saw 1"):
        faults(plan.replace(rows=plan.rows[:1]))


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_a_random_change_is_found_or_harmless(data, harm):
    """A second interpreter decides: what it cannot run to a complete end is rejected, and nothing else is."""
    draw = data.draw
    plan = make_plan(draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    plan = split_backward(plan) if draw(st.booleans()) else plan
    plan = insert_recompute(plan, "prefire", draw(st.integers(1, 3))) if draw(st.booleans()) else plan
    plan = insert_communication(plan) if draw(st.booleans()) else plan
    rows = [list(row) for row in plan.rows]
    for _ in range(draw(st.integers(1, 2))):
        rank = draw(st.integers(0, plan.ranks - 1))
        assume(rows[rank])
        position = draw(st.integers(0, len(rows[rank]) - 1))
        action = rows[rank].pop(position)
        how = draw(st.sampled_from(["delete", "double", "move", "send elsewhere", "other kind", "other micro-batch"]))
        if how == "double":
            rows[rank].insert(position, action)
        if how == "other kind" and not action.sub_actions:
            action = Action(action.stage, draw(st.sampled_from([*Kind][:-1])), action.micro_batch)
        elif how == "other micro-batch" and not action.sub_actions:
            action = action._replace(micro_batch=draw(st.integers(0, plan.micro_batches)))
        if how != "delete":
            target = draw(st.integers(0, plan.ranks - 1)) if how == "send elsewhere" else rank
            place = position if how.startswith("other") else draw(st.integers(0, len(rows[target])))
            rows[target].insert(place, action)
    broken = plan.replace(rows=tuple(map(tuple, rows)))
    assert bool(faults(broken)) == bool(harm(broken)), (faults(broken), harm(broken))
