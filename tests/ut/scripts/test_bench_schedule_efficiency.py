"""The schedule bench: every plan is one that the simulator can time, and the figures compare like with like."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from hyper_parallel.platform.mindspore import communication
from pipeline.execution.chunk import Chunk
from pipeline.plan import Action, insert_recompute, make_plan, simulate
from scripts.bench import schedule_efficiency as bench
from scripts.bench import schedule_efficiency_worker as worker
from scripts.bench import waiting

OPTIONS = bench._parser().parse_args(["--ranks", "4"])


@pytest.fixture(scope="module")
def chosen() -> list:
    return list(bench.plans(4, OPTIONS))


def test_the_worker_reads_the_plan_that_the_bench_wrote(chosen):
    for schedule, mode, plan in chosen:
        text = json.dumps(
            {"name": schedule, "mode": mode, "csv": plan.to_csv(), "rank_by_stage": plan.placement.rank_by_stage}
        )
        assert worker.read_plan(json.loads(text)).digest() == plan.digest()


def test_every_mode_of_every_schedule_is_there_once(chosen):
    assert len({(schedule, mode) for schedule, mode, _ in chosen}) == len(chosen) == 3 * len(OPTIONS.schedules)


def test_a_step_lasts_from_the_first_start_to_the_last_end(chosen):
    schedule, mode, plan = chosen[0]
    common = {"name": schedule, "mode": mode, "runs": [1.0, 1.0]}
    times = [{**common, "times": [(rank, 10 + rank)] * 2, "parts": {"F": 0.5, "W": rank / 10}} for rank in range(4)]
    row = bench._row(4, plan, times, 20.0, 0.5)
    assert row["fullest"] == 0.5 and row["block runs"] == [1.0]
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


def test_an_action_takes_what_the_simulator_is_told_its_own_work_included(chosen, monkeypatch):
    plan = next(plan for schedule, mode, plan in chosen if (schedule, mode) == ("1f1b", "prefire"))
    full_length, ends, clock = worker.FullLength(plan, 4.0), [], iter(range(1000))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(worker, "wait_until", ends.append)
    actions = [Action.parse(text) for text in ("0F0", "0R0", "0B0")]
    done = []
    for action in actions:
        full_length.hook(SimpleNamespace(run_default=done.append), action)
    assert done == actions
    assert ends == [0 + 4, 2 + 4, 4 + 8]
    assert [full_length.parts[kind] for kind in ("F", "R", "B")] == [[0.25], [0.25], [0.125]]


class Clock:
    """A clock that waiting moves on, and nothing else."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


@pytest.fixture
def alone(monkeypatch):
    """What one rank measures of a plan with recompute, where nothing but waits takes time."""
    clock = Clock()
    for module in (worker, waiting):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "wait_until", clock.wait_until)

    def measured(schedule: str, mode: str) -> dict:
        plan = insert_recompute(make_plan(schedule, 1, 4), mode)
        description = {"name": schedule, "mode": mode, "checkpointed": True, "csv": plan.to_csv(), "rank_by_stage": [0]}
        return worker.measure(description, 0.02, 1, communication.alone())

    return measured


@pytest.mark.parametrize(
    ("schedule", "mode", "kinds"),
    [("1f1b", "prefire", "FRB"), ("1f1b", "lazy", "FB"), ("zb-h1", "prefire", "FRIW"), ("zb-h1", "lazy", "FIW")],
)
def test_each_action_has_the_work_that_it_should_have(alone, schedule, mode, kinds):
    answer = alone(schedule, mode)
    assert answer["runs"] == [2.0]
    assert answer["parts"] == pytest.approx(dict.fromkeys(kinds, worker.WAITS))


def test_a_replay_at_the_wrong_place_is_seen(alone, monkeypatch):
    monkeypatch.setattr(Chunk, "recompute", lambda chunk, last=None: None)
    answer = alone("1f1b", "prefire")
    assert answer["runs"] == [2.0]
    assert answer["parts"] == pytest.approx({"F": worker.WAITS, "R": 0, "B": 1.5 * worker.WAITS})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"ratio": 1.061}, ["ratio 1.061"]),
        ({"fullest": 1.01}, ["an action needs 1.01 of its time"]),
        ({"block runs": [2.0, 3.0]}, ["block runs [2.0, 3.0]"]),
    ],
)
def test_what_counts_as_a_miss(changed, said):
    row = {"case": "1f1b p=4", "mode": "lazy", "ratio": 1.06, "fullest": 0.9, "block runs": [2.0], **changed}
    assert bench.misses(row) == [f"1f1b p=4, lazy: {text}" for text in said]
