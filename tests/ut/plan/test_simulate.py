"""The simulator against figures worked out by hand, and rules that hold for every plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.plan import (
    SCHEDULES,
    Communication,
    Costs,
    Memory,
    Plan,
    PlanError,
    insert_communication,
    insert_recompute,
    make_plan,
    simulate,
)


def spans(simulation, rank):
    """When each action of a rank runs."""
    return [(str(event.action), event.start, event.end) for event in simulation.events[rank]]


def test_each_stage_takes_its_own_time():
    costs = Costs(forward=[1, 2], backward_input=[3, 4], backward_weight=[5, 6])
    simulation = simulate(make_plan("gpipe", 2, 2), costs)
    assert spans(simulation, 0) == [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 15, 23), ("0B1", 25, 33)]
    assert spans(simulation, 1) == [("1F0", 1, 3), ("1F1", 3, 5), ("1B0", 5, 15), ("1B1", 15, 25)]
    assert (simulation.makespan, simulation.busy, simulation.bubble, simulation.span_bubble) == (33, [18, 24], 9, 15)


def test_a_split_backward_hands_its_gradient_on_after_dx():
    costs = Costs(forward=1, backward_input=2, backward_weight=4)
    simulation = simulate(Plan.from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n"), costs)
    assert spans(simulation, 0) == [("0F0", 0, 1), ("0I0", 4, 6), ("0W0", 6, 10)]


def test_a_transfer_takes_latency_and_size_over_bandwidth_and_keeps_no_rank_busy():
    transfers = Communication(latency=0.5, bandwidth=4, forward_size=[2, 0], backward_size=[0, 6])
    simulation = simulate(make_plan("1f1b", 2, 1), Costs(communication=transfers))
    assert spans(simulation, 1) == [("1F0", 2, 3), ("1B0", 3, 5)]
    assert spans(simulation, 0) == [("0F0", 0, 1), ("0B0", 7, 9)]
    assert simulation.busy == [3, 3]


def test_stages_on_one_rank_exchange_without_a_transfer():
    simulation = simulate(make_plan("interleaved", 1, 1, 2), Costs(communication=Communication(latency=9)))
    assert simulation.makespan == 6


def test_a_receive_that_comes_late_in_its_row_is_waited_for_there():
    first = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
    second = "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    plan = Plan.from_csv(f"{first}\n{second}\n")
    simulation = simulate(plan)
    assert spans(simulation, 1)[:3] == [("1RECV_F0", 0, 1), ("1RECV_F1", 1, 2), ("1F0", 2, 3)]
    assert simulation.busy == [6, 6]


@pytest.mark.parametrize(
    ("mode", "lead", "last_blocks", "makespan"),
    [("lazy", 1, None, 10), ("prefire", 1, None, 8), ("prefire", 1, 1, 9), ("prefire", 1, 0, 10)],
)
def test_what_a_recompute_leaves_out_the_backward_replays(mode, lead, last_blocks, makespan):
    """Two ranks, one micro-batch, stages of two blocks, r = 2. Rank 0 replays ahead what it can."""
    plan = insert_recompute(make_plan("1f1b", 2, 1), mode, lead, last_blocks)
    assert simulate(plan, Costs(recompute=2, blocks=2)).makespan == makespan


def test_an_overlapped_pair_takes_its_own_time_and_gives_both_results_at_its_end():
    plan = make_plan("dualpipe-v", 2, 4)
    apart, together = simulate(plan), simulate(plan, Costs(overlapped=2.5))
    pairs = [event for event in together.events[1] if event.action.sub_actions]
    assert {event.end - event.start for event in pairs} == {2.5}
    assert sum(apart.busy) - sum(together.busy) == 0.5 * sum(bool(a.sub_actions) for row in plan.rows for a in row)


def test_memory_of_a_chunk_that_keeps_its_activations():
    simulation = simulate(Plan.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n"), memory=Memory(activation=3, pending_weight=1))
    assert [tuple(level) for level in simulation.levels[0]] == [(3, 3), (6, 6), (6, 4), (4, 3), (3, 1), (1, 0)]
    assert simulation.peak_memory == [6]
    assert (str(simulation.peak_at[0].action), simulation.peak_at[0].time) == ("0F1", 1)


def test_memory_of_a_chunk_that_is_replayed():
    """4 of activations; the forward keeps 0.5 to replay from and 1 in excluded regions, a replay makes the other 3."""
    memory = Memory(activation=4, checkpoint_input=0.5, excluded=1)
    ahead = simulate(Plan.from_csv("0F0,0R0,0I0,0W0\n"), memory=memory)
    assert [tuple(level) for level in ahead.levels[0]] == [(1.5, 1.5), (4.5, 4.5), (4.5, 4.5), (4.5, 0)]
    lazy = simulate(Plan.from_csv("0F0,0R0:0,0B0\n"), memory=memory)
    assert [tuple(level) for level in lazy.levels[0]] == [(1.5, 1.5), (1.5, 1.5), (4.5, 0)]


def test_memory_of_a_replay_of_some_blocks():
    memory = Memory(activation=4, checkpoint_input=1, recomputed=4, blocks=4)
    simulation = simulate(Plan.from_csv("0F0,0R0:1,0B0\n"), memory=memory)
    assert [tuple(level) for level in simulation.levels[0]] == [(1, 1), (2, 2), (5, 0)]


@settings(deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(1, 4),
    micro_batches=st.integers(1, 6),
    mode=st.sampled_from(["none", "lazy", "prefire"]),
    latency=st.sampled_from([0.0, 0.25]),
    communicated=st.booleans(),
)
def test_rules_that_hold_for_every_plan(schedule, ranks, micro_batches, mode, latency, communicated):
    plan = make_plan(schedule, ranks, micro_batches)
    plan = plan if mode == "none" else insert_recompute(plan, mode)
    plan = insert_communication(plan) if communicated else plan
    costs = Costs(1.25, 1.5, 0.75, 0.5, communication=Communication(latency))
    simulation = simulate(plan, costs, Memory(checkpoint_input=0.25))
    each = 3.5 + (0.0 if mode == "none" else 0.5)
    assert simulation.busy == pytest.approx([micro_batches * plan.stages / ranks * each] * ranks)
    for events in simulation.events:
        assert all(before.end <= after.start + 1e-9 for before, after in zip(events, events[1:]))
    assert simulation.makespan == max(events[-1].end for events in simulation.events)
    assert 0 <= simulation.span_bubble <= simulation.bubble + 1e-9
    for rank, levels in enumerate(simulation.levels):
        assert levels[-1].after == pytest.approx(0, abs=1e-9)
        assert min(level.after for level in levels) > -1e-9
        assert simulation.peak_memory[rank] == max(level.during for level in levels)
        assert max(held for _, held in simulation.memory_curve(rank)) == simulation.peak_memory[rank]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": Costs(forward=[1, 2, 3])}, r"expected one number or 2 \(one per stage\) for forward, saw 3"),
        ({"costs": Costs(recompute=-1)}, "expected finite numbers from 0 up for recompute"),
        ({"memory": Memory(activation=float("nan"))}, "expected finite numbers from 0 up for activation"),
    ],
)
def test_costs_that_do_not_fit_are_told(arguments, message):
    with pytest.raises(PlanError, match=message):
        simulate(make_plan("1f1b", 2, 2), **arguments)


def test_a_plan_that_cannot_run_is_told_with_where_it_stands():
    plan = Plan.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(
        PlanError, match=r"saw rank 0 waits at position 1 with 0B0; rank 1 waits at position 0 with 1F1"
    ):
        simulate(plan)
