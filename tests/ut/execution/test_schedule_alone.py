"""A schedule on one rank that holds all stages: no message is sent, everything else is as on many ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel.platform.mindspore import autograd, communication
from pipeline import ActionError, PipelineError, PipelineStage, Schedule
from pipeline.execution.microbatch import MicroBatchError
from pipeline.execution.trace import to_rows
from pipeline.plan import Kind, Plan, insert_recompute, mapping, simulate, split_backward
from pipeline.plan.action import backward, forward
from pipeline.plan.render.picture import save_picture
from pipeline.plan.render.timeline import Timeline, simulated

STAGES, MICRO_BATCHES, WIDTH = 3, 4, 5


class Layer(nn.Cell):
    """tanh(x w); the last one returns the loss."""

    def __init__(self, number: int) -> None:
        super().__init__()
        values = np.random.RandomState(number).randn(WIDTH, WIDTH).astype(np.float32)
        self.weight = Parameter(Tensor(values), name=f"weight{number}")
        self.is_last = number == STAGES - 1

    def construct(self, x: Tensor, labels: Tensor = None) -> Tensor:
        x = mint.tanh(mint.matmul(x, self.weight))
        return ((x - labels) ** 2).mean() if self.is_last else x


def local_plan() -> Plan:
    """Micro-batch after micro-batch through all stages of one rank."""
    row = []
    for k in range(MICRO_BATCHES):
        row += [forward(stage, k) for stage in range(STAGES)]
        row += [backward(stage, k) for stage in reversed(range(STAGES))]
    return Plan((tuple(row),), mapping([0] * STAGES), MICRO_BATCHES, "local")


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = np.random.RandomState(100 + seed)
    return tuple(Tensor(random.randn(2 * MICRO_BATCHES, WIDTH).astype(np.float32)) for _ in range(2))


def reference(x: Tensor, labels: Tensor) -> tuple[float, list[np.ndarray]]:
    layers = [Layer(number) for number in range(STAGES)]

    def whole(x: Tensor) -> Tensor:
        return layers[2](layers[1](layers[0](x)), labels)

    loss, gradients = ms.value_and_grad(whole, None, [layer.weight for layer in layers])(x)
    return float(loss), [gradient.asnumpy() for gradient in gradients]


def make(plan: Plan, **options: object) -> Schedule:
    stages = [PipelineStage(Layer(number), number, STAGES) for number in range(STAGES)]
    return Schedule(plan, stages, world=communication.alone(), timeout=20.0, **options)


@pytest.fixture
def schedule() -> Iterator[Schedule]:
    made = make(insert_recompute(split_backward(local_plan()), "prefire"))
    yield made
    made.close()


def assert_close(gradients: tuple, wanted: list[np.ndarray]) -> None:
    for gradient, expected in zip(gradients, wanted):
        assert np.abs(gradient.asnumpy() - expected).max() <= 1e-6 * np.abs(expected).max()


def test_gradients_and_losses(schedule: Schedule) -> None:
    x, labels = batch()
    loss, wanted = reference(x, labels)
    losses = schedule.run(x, labels=labels)
    assert np.mean([float(one) for one in losses]) == pytest.approx(loss, rel=1e-6)
    assert_close(schedule.gradients(), wanted)


def test_gradients_are_taken_once(schedule: Schedule) -> None:
    x, labels = batch()
    schedule.run(x, labels=labels)
    schedule.gradients()
    assert all(autograd.gradient_of(weight) is None for weight in schedule.parameters())
    with pytest.raises(RuntimeError, match="at least one run before gradients"):
        schedule.gradients()


def test_the_trace_is_the_row(schedule: Schedule) -> None:
    x, labels = batch()
    schedule.run(x, labels=labels)
    assert [event.action for event in schedule.trace] == list(schedule.plan.rows[0])
    times = [time for event in schedule.trace for time in (event.start, event.end)]
    assert times == sorted(times)
    assert all(event.waiting >= 0 for event in schedule.trace)


def test_the_trace_is_drawn_above_the_simulated_timeline(schedule: Schedule, tmp_path: Path) -> None:
    x, labels = batch()
    schedule.run(x, labels=labels)
    text = json.dumps({"name": "measured", "unit": "s", "events": [to_rows(schedule.trace)]})
    measured, wanted = Timeline.from_json(text), simulated(simulate(schedule.plan), "simulated")
    lines = [[e.action for e in one.compute(0) if e.action.kind is not Kind.R] for one in (measured, wanted)]
    assert lines[0] == lines[1] == [action for action in schedule.plan.rows[0] if action.kind is not Kind.R]
    save_picture([measured, wanted], tmp_path / "both.svg")
    assert (tmp_path / "both.svg").stat().st_size > 1000


def test_an_evaluation_makes_no_gradients(schedule: Schedule) -> None:
    x, labels = batch()
    loss, _ = reference(x, labels)
    results = schedule.evaluate(x, labels=labels)
    assert np.mean([float(one) for one in results]) == pytest.approx(loss, rel=1e-6)
    assert all(autograd.gradient_of(weight) is None for weight in schedule.parameters())


def test_a_hook_replaces_an_action_until_it_is_taken_back(schedule: Schedule) -> None:
    x, labels = batch()
    _, wanted = reference(x, labels)
    seen = []

    def hook(step: object, action: object) -> None:
        seen.append(str(action))
        step.run_default(action)

    schedule.register("W", hook)
    schedule.run(x, labels=labels)
    assert_close(schedule.gradients(), wanted)
    assert seen == [str(action) for action in schedule.plan.rows[0] if action.kind is Kind.W]
    schedule.register(Kind.W, None)
    schedule.run(x, labels=labels)
    assert len(seen) == STAGES * MICRO_BATCHES


def test_a_batch_that_does_not_divide_leaves_the_next_schedule_whole() -> None:
    x, labels = batch()
    broken = make(local_plan())
    with pytest.raises(MicroBatchError, match="4 micro-batches divide, got 7"):
        broken.run(x[:7], labels=labels)
    whole = make(local_plan())
    whole.run(x, labels=labels)
    assert_close(whole.gradients(), reference(x, labels)[1])
    whole.close()


def test_stages_that_are_not_those_of_the_plan() -> None:
    stages = [PipelineStage(Layer(number), number, STAGES) for number in range(2)]
    with pytest.raises(
        PipelineError, match=r"rank 0, at the start: expected stages \[0, 1, 2\] of 3, as plan local places"
    ):
        Schedule(local_plan(), stages, world=communication.alone(), timeout=20.0)


def test_a_stage_index_out_of_range() -> None:
    with pytest.raises(ValueError, match="a stage index from 0 to 2, got 3"):
        PipelineStage(Layer(0), 3, 3)


def test_an_action_that_raises_says_where() -> None:
    x, labels = batch()
    schedule = make(local_plan())

    def hook(step: object, action: object) -> None:
        if action.micro_batch == 1 and action.stage == 1:
            raise ValueError("no luck")
        step.run_default(action)

    schedule.register(Kind.B, hook)
    with pytest.raises(ActionError) as caught:
        schedule.run(x, labels=labels)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 0, stage 1, action 1B1 (11 of 24): ValueError: no luck"
    assert ">>1B1<<" in lines[1]
    assert isinstance(caught.value.__cause__, ValueError)
