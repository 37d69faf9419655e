"""`auto`: never worse than the best named schedule, within memory, and the same every time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.plan import SCHEDULES, Communication, Costs, Kind, Memory, PlanError, faults, make_plan, mapping, simulate
from pipeline.plan.passes import insert_recompute, split_backward
from pipeline.plan.placement import loop, v_shape
from pipeline.plan.schedules import TAKES_VIRTUAL
from pipeline.plan.search import auto, named_plans
from pipeline.plan.search.list_scheduling import Policy, lines, schedule
from pipeline.plan.search.local_search import improve
from pipeline.plan.search.problem import Problem

MODES = ("none", "lazy", "prefire")


def uneven(stages: int, seed: int) -> tuple[Costs, Memory]:
    draw = random.Random(seed)

    def each(low: float, high: float) -> list[float]:
        return [draw.uniform(low, high) for _ in range(stages)]

    costs = Costs(each(0.5, 1.5), each(0.5, 1.5), each(0.3, 1.2), each(0.5, 1.5), communication=Communication(0.1))
    return costs, Memory(activation=each(0.7, 1.3), checkpoint_input=0.1)


def best_named(ranks, micro_batches, stages, costs, memory, limit):
    """The least makespan of the named schedules within the limit, computed without the search's own list of them."""
    best = float("inf")
    for name in SCHEDULES:
        plan = make_plan(name, ranks, micro_batches, stages // ranks if name in TAKES_VIRTUAL else None)
        for mode in MODES if plan.stages == stages else ():
            simulation = simulate(plan if mode == "none" else insert_recompute(plan, mode), costs, memory)
            if max(simulation.peak_memory) <= limit:
                best = min(best, simulation.makespan)
    return best


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_auto_is_never_worse_than_the_best_named_schedule(stages_per_rank, record_property):
    ranks, micro_batches, stages = 4, 8, 4 * stages_per_rank
    gains = []
    for seed in range(4):
        costs, memory = uneven(stages, seed)
        for limit in (2.0 * stages_per_rank, 4.0 * stages_per_rank, 8.0 * stages_per_rank):
            result = auto(ranks, micro_batches, costs, memory, limit, stages, MODES, effort=0.05)
            named = best_named(ranks, micro_batches, stages, costs, memory, limit)
            again = simulate(result.plan, costs, memory)
            assert not faults(result.plan)
            assert again.makespan == result.simulation.makespan <= named
            assert max(again.peak_memory) <= limit + 1e-9
            assert result.lower_bound <= again.makespan + 1e-9
            if named < float("inf"):
                assert result.best_named.simulation.makespan == named
                gains.append(1.0 - again.makespan / named)
    record_property("mean_gain", sum(gains) / max(len(gains), 1))
    assert stages_per_rank > 1 or sum(gains) / len(gains) > 0.02, gains


def test_auto_is_a_function_of_its_arguments():
    costs, memory = uneven(3, 5)
    plans = [auto(3, 6, costs, memory, 2.5, effort=0.02).plan for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].digest() == plans[1].digest()


def test_auto_reaches_the_bound_where_memory_does_not_matter():
    result = auto(2, 6)
    assert result.simulation.makespan == result.lower_bound == 6 * 3 + 1


def test_auto_keeps_a_named_schedule_that_cannot_be_bettered():
    assert auto(1, 4).plan.name in SCHEDULES


def test_auto_without_recompute_has_none_and_with_lazy_only_lazy_ones():
    costs, memory = uneven(3, 1)
    plain = auto(3, 6, costs, memory, 4.0, effort=0.02).plan
    assert not [action for row in plain.rows for action in row if action.kind is Kind.R]
    lazy = auto(3, 6, costs, memory, 1.6, recompute=("none", "lazy"), effort=0.02).plan
    assert {action.last_blocks for row in lazy.rows for action in row if action.kind is Kind.R} == {0}


def test_auto_has_a_limit_per_rank():
    result = auto(3, 6, memory_limit=[3.0, 1.0, 2.0], effort=0.05)
    assert all(peak <= limit for peak, limit in zip(result.simulation.peak_memory, (3.0, 1.0, 2.0)))
    assert max(result.simulation.peak_memory) == 3.0


def test_a_replay_lets_go_before_the_next_one_of_its_micro_batch_starts():
    """Both stages of each rank are replayed, and there is room for one replay at a time."""
    costs, memory = uneven(6, 0)
    placement, checkpointed = loop(3, 2), (False, False, True, True, False, True)
    problem = Problem(placement, 2, costs, memory, [2.15] * 3)
    rows = schedule(problem, Policy(*map(tuple, lines(problem, 0.0, 0.0)), 0.0, checkpointed, problem.limits))
    assert not faults(problem.to_plan(rows, checkpointed, "tight", [False] * 3))


def test_auto_pairs_heavy_with_light_stages():
    """Stages 0 and 2 are heavy; the loop puts both on rank 0."""
    heavy = [3.0, 1.0, 3.0, 1.0]
    result = auto(2, 6, Costs(heavy, heavy, heavy), stages=4, effort=0.1)
    assert result.plan.placement.rank_of(0) != result.plan.placement.rank_of(2)
    assert max(result.simulation.busy) == 6 * 3 * 4


def test_auto_reports_progress_up_to_the_end():
    seen = []
    auto(2, 4, memory_limit=1.5, effort=0.02, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": 0.5}, "expected a memory limit that some plan keeps within, saw 0.5; .* needs least takes"),
        ({"memory_limit": 0.0}, "expected a memory limit above 0"),
        ({"memory_limit": [1.0]}, "one number or 2"),
        ({"recompute": ("eager",)}, "expected some of none, lazy, prefire for recompute, saw"),
        ({"stages": 1}, "expected at least 2 for stages, saw 1"),
        ({"micro_batches": 0}, "expected at least 1 for micro_batches, saw 0"),
        ({"costs": Costs(forward=[1.0, 2.0, 3.0])}, "one number or 2 .* for forward, saw 3"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    with pytest.raises(PlanError, match=message):
        auto(**{"ranks": 2, "micro_batches": 3, "effort": 0.01, **arguments})


def test_named_plans_have_the_stages_asked_for():
    assert {plan.name for plan in named_plans(2, 4, 2)} >= {"gpipe", "1f1b"}
    assert all(plan.stages == 4 for plan in named_plans(2, 4, 4))
    assert not list(named_plans(2, 4, 3))


@pytest.mark.parametrize("mode", MODES)
def test_the_search_times_and_weighs_rows_as_the_simulator_does(mode):
    costs, memory = uneven(4, 9)
    plan = split_backward(make_plan("1f1b", 4, 6))
    plan = plan if mode == "none" else insert_recompute(plan, mode)
    problem = Problem(plan.placement, 6, costs, memory, [100.0] * 4, replays_lazily=mode == "lazy")
    rows, checkpointed = problem.from_plan(plan)
    simulation = simulate(plan, costs, memory)
    assert problem.timing(rows, problem.step_times(checkpointed)).makespan == pytest.approx(simulation.makespan)
    assert [problem.peak(row, checkpointed) for row in rows] == pytest.approx(simulation.peak_memory)
    assert problem.to_plan(rows, checkpointed, plan.name, [False] * 4) == plan


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    placement=st.sampled_from([loop(3), loop(3, 2), v_shape(3), loop(2, 3), mapping([0, 0, 1, 1]), mapping([1, 0, 1])]),
    micro_batches=st.integers(1, 9),
    lead=st.sampled_from([0.0, 5.0, 50.0, -50.0]),
    lag=st.sampled_from([0.0, 3.0, float("inf")]),
    room=st.floats(0.0, 2.0),
    lazily=st.booleans(),
)
def test_list_scheduling_never_deadlocks_nor_exceeds_memory(seed, placement, micro_batches, lead, lag, room, lazily):
    """The limit is what one micro-batch needs on the fullest rank, and a little: the tightest that can work."""
    stages, draw = placement.stages, random.Random(seed)
    costs, memory = uneven(stages, seed)
    checkpointed = tuple(draw.random() < 0.5 for _ in range(stages))
    least = 0.0
    for rank in range(placement.ranks):
        held = placement.stages_of(rank)
        kept = sum(0.1 if checkpointed[stage] else memory.activation[stage] for stage in held)
        least = max(least, kept + max((memory.activation[stage] for stage in held if checkpointed[stage]), default=0.0))
    limits = [least + room] * placement.ranks
    problem = Problem(placement, micro_batches, costs, memory, limits, lazily)
    policy = Policy(*map(tuple, lines(problem, lead, lag)), draw.choice((0.0, 1.0)), checkpointed, problem.limits)
    rows = schedule(problem, policy)
    plan = problem.to_plan(rows, checkpointed, "listed", [False] * placement.ranks)
    assert not faults(plan)
    simulation = simulate(plan, costs, memory)
    assert max(simulation.peak_memory) <= limits[0] + 1e-6
    tight = problem.__class__(placement, micro_batches, costs, memory, [0.05] * placement.ranks, lazily)
    assert schedule(tight, policy._replace(limits=tight.limits)) is None


def test_local_search_leaves_its_input_and_only_betters_it():
    """The limit is what the fullest rank holds already, so moves that would hold more are turned down."""
    costs, memory = uneven(3, 2)
    plan = split_backward(make_plan("1f1b", 3, 6))
    given_plan = simulate(plan, costs, memory)
    problem = Problem(plan.placement, 6, costs, memory, [max(given_plan.peak_memory)] * 3)
    rows, checkpointed = problem.from_plan(plan)
    before = [list(row) for row in rows]
    improved = improve(problem, rows, checkpointed, 1000, 0.0, random.Random(0))
    assert rows == before
    assert improved.makespan < given_plan.makespan
    better = problem.to_plan(improved.rows, checkpointed, "improved", [False] * 3)
    assert not faults(better)
    again = simulate(better, costs, memory)
    assert again.makespan == pytest.approx(improved.makespan)
    assert all(peak <= limit + 1e-9 for peak, limit in zip(again.peak_memory, problem.limits))
