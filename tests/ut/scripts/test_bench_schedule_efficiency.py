"""The schedule bench: every plan is one that the simulator can time, and the figures compare like with like."""

from __future__ import annotations

import json

import pytest

from pipeline.plan import simulate
from scripts.bench import schedule_efficiency as bench
from scripts.bench.schedule_efficiency_worker import read_plan

OPTIONS = bench._parser().parse_args(["--ranks", "4"])


@pytest.fixture(scope="module")
def chosen() -> list:
    return list(bench.plans(4, OPTIONS))


def test_the_worker_reads_the_plan_that_the_bench_wrote(chosen):
    for schedule, mode, plan in chosen:
        text = json.dumps(
            {"name": schedule, "mode": mode, "csv": plan.to_csv(), "rank_by_stage": plan.placement.rank_by_stage}
        )
        assert read_plan(json.loads(text)).digest() == plan.digest()


def test_every_mode_of_every_schedule_is_there_once(chosen):
    assert len({(schedule, mode) for schedule, mode, _ in chosen}) == len(chosen) == 3 * len(OPTIONS.schedules)


def test_a_step_lasts_from_the_first_start_to_the_last_end(chosen):
    schedule, mode, plan = chosen[0]
    times = [{"name": schedule, "mode": mode, "times": [(rank, 10 + rank)] * 2, "runs": [1.0]} for rank in range(4)]
    row = bench._row(4, plan, times, 20.0, 0.5)
    assert row["measured ms"] == 13_000
    assert row["simulated ms"] == simulate(plan, bench.costs_of(20.0, 0.5)).makespan
    assert row["bare ratio"] == pytest.approx(13_000 / simulate(plan, bench.costs_of(20.0)).makespan)
    assert row["bare ratio"] > row["ratio"]
    assert row["ratio"] == pytest.approx(13_000 / row["simulated ms"])


def test_the_simulator_says_that_pre_firing_saves_what_the_bench_demands(chosen):
    costs = bench.costs_of(20.0)
    rows = [
        {"schedule": schedule, "ranks": 4, "mode": mode, "measured ms": simulate(plan, costs).makespan}
        for schedule, mode, plan in chosen
    ]
    gains = {gain["schedule"]: gain["share"] for gain in bench.prefire_gains(rows, 4, 20.0)}
    assert gains["1f1b"] == pytest.approx(1.0)
