"""Plans as CSV, torch's form of it, and the passes from plan to plan."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.plan import (
    SCHEDULES,
    Costs,
    Kind,
    Placement,
    Plan,
    PlanError,
    faults,
    insert_communication,
    insert_recompute,
    limit_pending_weight,
    loop,
    make_plan,
    mapping,
    merge_backward,
    remove_communication,
    simulate,
    split_backward,
    v_shape,
)
from pipeline.plan.costs import Memory
from pipeline.plan.search.list_scheduling import Policy, schedule
from pipeline.plan.search.problem import Problem

TORCH_FILES = sorted(Path(__file__).with_name("data").glob("torch_*.csv"))


@st.composite
def plans(draw, schedules=tuple(SCHEDULES), most_ranks=4, most_micro_batches=7):
    """A plan of a named schedule, perhaps split or merged, without recompute and communication."""
    name = draw(st.sampled_from(schedules))
    virtual = draw(st.integers(1, 3)) if name in ("interleaved", "bfs") else None
    plan = make_plan(name, draw(st.integers(1, most_ranks)), draw(st.integers(1, most_micro_batches)), virtual)
    change = draw(st.sampled_from([None, split_backward, merge_backward]))
    return change(plan) if change else plan


@st.composite
def any_order_plans(draw):
    """A plan that no schedule has: any placement, an order from random priorities."""
    placement = draw(
        st.one_of(
            st.sampled_from([loop(3), v_shape(3), mapping([1, 0, 1]), mapping([0, 0, 1, 2, 1])]),
            st.permutations([0, 1, 2]).map(mapping),
            st.permutations([0, 1, 2, 0, 2]).map(mapping),
        )
    )
    micro_batches = draw(st.integers(1, 6))
    starts = st.lists(st.floats(0, 30), min_size=placement.stages, max_size=placement.stages).map(tuple)
    none = (False,) * placement.stages
    policy = Policy(
        draw(starts), draw(starts), draw(starts), draw(st.sampled_from([0.0, 1.0])), none, (1e9,) * placement.ranks
    )
    problem = Problem(placement, micro_batches, Costs(), Memory(), [1e9] * placement.ranks)
    return problem.to_plan(schedule(problem, policy), none, "listed", (False,) * placement.ranks)


def compute(plan, *without):
    """The rows without communication and the given kinds."""
    rows = remove_communication(plan).rows
    return tuple(tuple(action for action in row if action.kind not in without) for row in rows)


# CSV


@settings(deadline=None, max_examples=150)
@given(st.one_of(plans(), any_order_plans()), st.booleans(), st.booleans())
def test_csv_is_read_back_exactly(plan, recomputed, communicated):
    plan = insert_recompute(plan, "prefire", 2, 1) if recomputed else plan
    plan = insert_communication(plan) if communicated else plan
    read = Plan.from_csv(plan.to_csv(), plan.placement, plan.micro_batches, plan.name)
    assert read == plan
    assert read.to_csv() == plan.to_csv()
    assert read.digest() == plan.digest()


@settings(deadline=None, max_examples=50)
@given(plans())
def test_placement_and_micro_batches_are_read_from_the_rows(plan):
    read = Plan.from_csv(plan.to_csv())
    assert (read.rows, read.placement, read.micro_batches) == (plan.rows, plan.placement, plan.micro_batches)


def test_a_csv_is_read_strictly_and_every_wrong_cell_is_told_with_its_place():
    with pytest.raises(PlanError) as raised:
        Plan.from_csv("0F0,0F0x,0B0\n1F0,1B0,zz\n")
    lines_ = str(raised.value).splitlines()
    assert [line.split(": ")[0] for line in lines_] == ["row 0, cell 1", "row 1, cell 2"]
    assert "saw '0F0x'" in lines_[0]
    assert "saw 'zz'" in lines_[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a row per rank with an action per cell, saw no action at all"),
        ("\n,,\n", "saw no action at all"),
        ("0F0,0B0,0F99999999999\n", "expected every micro-batch up to the largest, saw 0F99999999999 among only 3"),
        ("0F0,0B0,99999999999F0\n", "expected every stage up to the largest, saw 99999999999F0 among only 3"),
        ("0F0,0B0\n2F0,2B0\n", r"expected actions of every stage up to 2, saw none of \[1\]"),
    ],
)
def test_a_csv_without_a_plan_in_it(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_csv(text)


def test_spaces_quotes_line_ends_and_idle_cells_do_not_matter():
    plan = make_plan("1f1b", 2, 2)
    text = ' 0F0 ,"0F1",,0B0,0B1\r\n,1F0,1B0,1F1,1B1,,\r\n'
    assert Plan.from_csv(text).rows == plan.rows


def test_the_digest_is_that_of_what_runs():
    plan = make_plan("1f1b", 2, 4)
    assert plan.digest() == plan.replace(name="another").digest()
    others = [make_plan("gpipe", 2, 4), make_plan("1f1b", 2, 5), insert_recompute(plan), insert_communication(plan)]
    assert len({plan.digest(), *(other.digest() for other in others)}) == 5


# torch's CSV


@pytest.mark.parametrize("file", TORCH_FILES, ids=[file.stem for file in TORCH_FILES])
def test_a_csv_that_torch_wrote_is_read_and_valid(file):
    """Written by torch 2.13's own writer (`_PipelineScheduleRuntime._dump_csv`), idle cells and sharding included."""
    text = file.read_text()
    plan = Plan.from_csv(text)
    assert faults(plan) == []
    cells = [[cell for cell in row if cell and not cell.endswith(("SHARD", "REDUCE_GRAD"))] for row in _cells(text)]
    assert list(_cells(plan.to_csv())) == cells


def test_torch_and_this_project_draw_the_same_schedules():
    def stems(part):
        return next(file for file in TORCH_FILES if part in file.stem).read_text()

    assert compute(Plan.from_csv(stems("interleaved"))) == make_plan("interleaved", 2, 4).rows
    assert compute(Plan.from_csv(stems("dualpipe"))) == make_plan("dualpipe-v", 2, 6).rows


@pytest.mark.parametrize("communicated", [False, True])
def test_torch_reads_a_csv_without_recompute(communicated):
    """By torch's own parser of actions, and written by it as it was."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
    for name in SCHEDULES:
        plan = make_plan(name, 3, 6)
        text = (insert_communication(plan) if communicated else plan).to_csv()
        assert [[str(schedules._Action.from_str(cell)) for cell in row] for row in _cells(text)] == list(_cells(text))


def _cells(text):
    return csv.reader(io.StringIO(text))


# Passes


@settings(deadline=None, max_examples=200)
@given(
    plan=plans(),
    mode=st.sampled_from(["lazy", "prefire"]),
    lead=st.integers(1, 6),
    last_blocks=st.one_of(st.none(), st.integers(0, 4)),
    communicated=st.booleans(),
)
def test_recompute_is_inserted_once_per_chunk_and_moves_nothing_else(plan, mode, lead, last_blocks, communicated):
    source = insert_communication(plan) if communicated else plan
    changed = insert_recompute(source, mode, lead, last_blocks)
    assert faults(changed) == []
    assert changed.has_communication == source.has_communication
    assert compute(changed, Kind.R) == plan.rows
    for row in compute(changed):
        others = [action for action in row if action.kind is not Kind.R]
        backward_at = {
            part[:3:2]: at for at, action in enumerate(others) for part in action.parts if part.kind in (Kind.B, Kind.I)
        }
        forward_at = {
            part[:3:2]: at for at, action in enumerate(others) for part in action.parts if part.kind is Kind.F
        }
        replays = [action for action in row if action.kind is Kind.R]
        assert sorted(action[:3:2] for action in replays) == sorted(backward_at)
        passed = 0
        for action in row:
            if action.kind is not Kind.R:
                passed += 1
                continue
            chunk = action[:3:2]
            assert action.last_blocks == (0 if mode == "lazy" else last_blocks)
            ahead = 1 if mode == "lazy" else lead
            assert passed == max(backward_at[chunk] - ahead + 1, forward_at[chunk] + 1)


def test_a_recompute_replaces_the_one_that_is_there():
    plan = make_plan("zb-h1", 3, 5)
    once = insert_recompute(plan, "prefire", 2)
    assert insert_recompute(insert_recompute(plan, "lazy"), "prefire", 2).rows == once.rows


@settings(deadline=None, max_examples=150)
@given(plans(), st.booleans())
def test_split_and_merge_are_each_others_inverse(plan, communicated):
    merged = merge_backward(plan)
    source = insert_communication(merged) if communicated else merged
    split = split_backward(source)
    assert faults(split) == []
    assert merge_backward(split).rows == source.rows
    singles = [action for row in split.rows for action in row if not action.sub_actions]
    assert not [action for action in singles if action.kind is Kind.B]
    assert split_backward(split).rows == split.rows
    assert merge_backward(merged).rows == merged.rows


@settings(deadline=None, max_examples=150)
@given(plans(), st.integers(0, 6), st.booleans())
def test_pending_dw_are_bounded_and_no_other_action_moves(plan, limit, communicated):
    source = insert_communication(plan) if communicated else plan
    limited = limit_pending_weight(source, limit)
    assert faults(limited) == []
    assert compute(limited, Kind.W) == compute(plan, Kind.W)
    for before, row in zip(plan.rows, compute(limited)):
        assert _most_pending(row) <= limit
        if _most_pending(before) <= limit:
            assert row == before


def _most_pending(row):
    """The most chunks between dx and dw, where the row goes on with something else than dw."""
    pending = most = 0
    for at, action in enumerate(row):
        pending += sum(part.kind is Kind.I for part in action.parts) - (action.kind is Kind.W)
        if at + 1 == len(row) or row[at + 1].kind is not Kind.W:
            most = max(most, pending)
    return most


@settings(deadline=None, max_examples=200)
@given(st.one_of(plans(), any_order_plans()), st.integers(0, 2**32 - 1))
def test_inserted_communication_never_deadlocks(harm, plan, seed):
    """Whatever costs the order of the transfers was made for."""
    costs = Costs(*([1.0 + (seed >> (4 * kind + stage) & 3) for stage in range(plan.stages)] for kind in range(3)))
    sent = insert_communication(plan, costs)
    assert faults(sent) == []
    assert harm(sent) == ""
    assert remove_communication(sent) == plan
    assert insert_communication(sent, costs) == sent
    crossing = sum(plan.placement.crosses(stage) for stage in range(plan.stages))
    assert sum(map(len, sent.rows)) - sum(map(len, plan.rows)) == 4 * crossing * plan.micro_batches


@settings(deadline=None, max_examples=50)
@given(plans())
def test_transfers_that_take_no_time_cost_no_time(plan):
    assert simulate(insert_communication(plan)).makespan == simulate(plan).makespan


def test_a_plan_that_cannot_run_gets_no_communication():
    plan = make_plan("1f1b", 2, 3)
    rows = (plan.rows[0], (plan.rows[1][4], *plan.rows[1][:4], plan.rows[1][5]))
    with pytest.raises(
        PlanError, match=r"expected a plan that runs to its end, saw rank 0 at 0B0, rank 1 at 1F2 stuck"
    ):
        insert_communication(plan.replace(rows=rows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: insert_recompute(plan, "eager"), "expected lazy or prefire as recompute mode, saw 'eager'"),
        (lambda plan: insert_recompute(plan, "prefire", 0), "expected a lead of at least 1, saw 0"),
        (lambda plan: insert_recompute(plan, "prefire", 1, -1), "expected a number of blocks from 0 up, .* saw -1"),
        (lambda plan: limit_pending_weight(plan, -1), "expected a limit of pending dw from 0 up, saw -1"),
        (lambda plan: Placement((), 2), "expected at least one rank and one stage, saw 2 and 0"),
        (lambda plan: Placement((0, 2), 2), "expected a rank below 2 for stage 1, saw 2"),
        (lambda plan: mapping([]), "expected at least one rank and one stage"),
    ],
)
def test_wrong_arguments_are_told(change, message):
    with pytest.raises(PlanError, match=message):
        change(make_plan("1f1b", 2, 3))


def test_plans_need_no_mindspore():
    heavy = {"mindspore", "numpy", "rich", "matplotlib"}
    code = f"import sys, pipeline.plan, pipeline.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
