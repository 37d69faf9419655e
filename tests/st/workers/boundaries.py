"""What may cross a stage boundary, how inputs reach stages, and what a schedule can do besides a plain step."""

from __future__ import annotations

from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from hyper_parallel.core.activation_checkpoint import checkpoint_wrapper
from hyper_parallel.platform.mindspore import communication
from pipeline import PipelineError, PipelineStage, Schedule, Schedule1F1B, ScheduleZBV, SharedParameterInfo
from pipeline.plan import Kind, Plan, make_plan
from pipeline.plan.costs import Costs
from pipeline.plan.search import auto
from tests.st.workers import model

MICRO_BATCHES = 4
TIMEOUT = 60.0


def train(schedule: Schedule, x: Tensor, labels: Tensor, **inputs: Any) -> tuple[list, tuple]:
    """One step: what the last stage returned, and the gradients."""
    return schedule.run(x, labels=labels, **inputs), schedule.gradients()


def plain(world: communication.World, **options: Any) -> Schedule1F1B:
    """1F1B over the small model without checkpointing."""
    stage = PipelineStage(model.piece(world.rank, world.size), world.rank, world.size)
    return Schedule1F1B(stage, MICRO_BATCHES, timeout=TIMEOUT, **options)


def changing_shapes(world: communication.World) -> dict:
    """The batch changes from step to step, and there is an evaluation between two steps."""
    found = []
    with plain(world) as schedule:
        for rows in (8, 16, 16, 4, 8):
            x, labels = model.batch(rows, seed=rows)
            evaluated = schedule.evaluate(x, labels=labels)
            losses, gradients = train(schedule, x, labels)
            loss, wanted = model.reference(world.size, x, labels)
            means = [float(np.mean([float(one) for one in part])) if part else loss for part in (losses, evaluated)]
            found.append({"error": model.error(schedule.parameters(), gradients, wanted), "loss": loss, "means": means})
        return {"steps": found, "pending": schedule.pending()}


class Mixed(nn.Cell):
    """Passes on many kinds of values beside the one that is trained."""

    KINDS = (ms.float16, ms.bfloat16, ms.int32, ms.int64, ms.bool_, ms.int8, ms.uint8)

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.block = model.Block(stage)
        self.stage, self.is_last = stage, stage == stages - 1
        self.seen: list = []

    def construct(self, x: Tensor, extra: Optional[dict] = None, count: int = 0, labels: Tensor = None) -> Any:
        micro_batch = count if self.stage else float(x[0, 0])
        if self.stage == 0:
            extra = {str(kind): Tensor(np.arange(6).reshape(2, 3) % 2).astype(kind) for kind in self.KINDS}
            extra = {**extra, "none": None, "text": "words", "pair": (1.5, [True, 2]), "empty": mint.empty((0, 3))}
            count = int(np.sign(micro_batch) * 1000)
        self.seen.append((extra, count))
        x = self.block(x)
        if self.is_last:
            return {"loss": ((x - labels) ** 2).mean(), "count": count, "extra": extra}
        return {"x": x, "extra": extra, "count": count + 1}


def mixed_values(world: communication.World) -> dict:
    """Dicts as keyword inputs, numbers that differ between micro-batches, None, text, empty and integer tensors."""
    cell = Mixed(world.rank, world.size)
    schedule = Schedule1F1B(PipelineStage(cell, world.rank, world.size), MICRO_BATCHES, timeout=TIMEOUT)
    x, labels = model.batch(8)
    results, gradients = train(schedule, x, labels)
    _, wanted = model.reference(world.size, x, labels, blocks=1)
    extra, _ = cell.seen[0]
    found = {
        "error": model.error(schedule.parameters(), gradients, wanted),
        "counts": [count for _, count in cell.seen],
        "first_counts": [int(np.sign(float(x[2 * k, 0])) * 1000) for k in range(MICRO_BATCHES)],
        "dtypes": [str(extra[str(kind)].dtype) for kind in Mixed.KINDS],
        "wanted_dtypes": [str(kind) for kind in Mixed.KINDS],
        "values": [extra[str(kind)].astype(ms.int32).asnumpy().tolist() for kind in Mixed.KINDS],
        "rest": [extra["none"], extra["text"], extra["pair"], list(extra["empty"].shape)],
        "results": [sorted(result) for result in results],
        "pending": schedule.pending(),
    }
    schedule.close()
    return found


class Wide(nn.Cell):
    """Two tensors in, two out; one of them is never used for the loss and gets no gradient."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.block = model.Block(stage)
        self.is_last = stage == stages - 1

    def construct(self, x: Tensor, unused: Tensor = None, labels: Tensor = None) -> Any:
        x = self.block(x)
        return ((x - labels) ** 2).mean() if self.is_last else (x, x * 2)


def unused_output(world: communication.World) -> dict:
    """An output that needs a gradient but gets none."""
    stage = PipelineStage(Wide(world.rank, world.size), world.rank, world.size)
    x, labels = model.batch(8)
    _, wanted = model.reference(world.size, x, labels, blocks=1)
    with Schedule1F1B(stage, MICRO_BATCHES, split=True, timeout=TIMEOUT) as schedule:
        _, gradients = train(schedule, x, labels)
        return {"error": model.error(schedule.parameters(), gradients, wanted)}


class Tied(nn.Cell):
    """A piece whose first or last product uses a shared weight."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.block = model.Block(stage)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first or self.is_last:
            values = np.random.RandomState(77 + stage).randn(model.WIDTH, model.WIDTH).astype(np.float32) / 4
            self.tied = model.labelled(f"tied{stage}", values)

    def construct(self, x: Tensor, labels: Tensor = None) -> Tensor:
        if self.is_first:
            x = mint.matmul(x, self.tied)
        x = self.block(x)
        return ((mint.matmul(x, self.tied.T) - labels) ** 2).mean() if self.is_last else x


def tied_reference(stages: int, x: Tensor, labels: Tensor) -> dict[str, np.ndarray]:
    """Gradients with one weight in both places."""
    cells = [Tied(stage, stages) for stage in range(stages)]
    cells[-1].tied = cells[0].tied

    def forward(x: Tensor) -> Tensor:
        for cell in cells[:-1]:
            x = cell(x)
        return cells[-1](x, labels)

    weights = [cells[0].tied] + [weight for cell in cells for weight in cell.block.trainable_params()]
    gradients = ms.value_and_grad(forward, None, weights)(x)[1]
    return {weight.label: gradient.asnumpy() for weight, gradient in zip(weights, gradients)}


def shared_parameters(world: communication.World) -> dict:
    """A weight of the first and the last stage: on two ranks (1F1B) and on one (ZB-V)."""
    found = {}
    x, labels = model.batch(8 * MICRO_BATCHES)
    for kind, stages, micro_batches in ((Schedule1F1B, world.size, 4), (ScheduleZBV, 2 * world.size, 8)):
        shared = [SharedParameterInfo({0: "tied", stages - 1: "tied"})]
        mine = (world.rank,) if stages == world.size else (world.rank, stages - 1 - world.rank)
        cells = [PipelineStage(Tied(index, stages), index, stages) for index in mine]
        schedule = kind(cells, micro_batches, shared_parameters=shared, timeout=TIMEOUT)
        wanted = tied_reference(stages, x, labels)
        wanted[f"tied{stages - 1}"] = wanted["tied0"]
        _, gradients = train(schedule, x, labels)
        values = [weight.asnumpy().sum() for weight in schedule.parameters() if weight.label.startswith("tied")]
        found[kind.__name__] = {
            "error": model.error(schedule.parameters(), gradients, wanted),
            "values": [float(value) for value in values],
        }
        schedule.close()
    return found


def several_runs(world: communication.World) -> dict:
    """Two runs before one step give the mean of both; a loss scale changes nothing."""
    first, second = model.batch(8, seed=1), model.batch(8, seed=2)
    x, labels = (Tensor(np.concatenate([a.asnumpy(), b.asnumpy()])) for a, b in zip(first, second))
    _, wanted = model.reference(world.size, x, labels)
    found = {}
    for scale in (1.0, 1024.0):
        with plain(world, loss_scale=scale) as schedule:
            for part in (first, second):
                schedule.run(part[0], labels=part[1])
            found[str(scale)] = model.error(schedule.parameters(), schedule.gradients(), wanted)
            found["again"] = model.error(schedule.parameters(), train(schedule, x, labels)[1], wanted)
    return found


def pipeline_times_data(world: communication.World) -> dict:
    """Two pipelines of half the ranks, each with half the batch, give the gradients of the whole batch."""
    ranks = world.size // 2
    index, copy = divmod(world.rank, 2)
    stage = PipelineStage(model.piece(index, ranks), index, ranks)
    x, labels = model.batch(16)
    _, wanted = model.reference(ranks, x, labels)
    with Schedule1F1B(stage, MICRO_BATCHES, copies=2, timeout=TIMEOUT) as schedule:
        half = slice(copy * 8, copy * 8 + 8)
        _, gradients = train(schedule, x[half], labels[half])
        return {"error": model.error(schedule.parameters(), gradients, wanted), "pending": schedule.pending()}


def hooks(world: communication.World) -> dict:
    """Functions registered for kinds of actions are called instead of them, for overlapped pairs too."""
    plan = make_plan("dualpipe-v", world.size, 2 * world.size)
    stages = [
        PipelineStage(model.piece(index, plan.stages, blocks=1), index, plan.stages)
        for index in plan.placement.stages_of(world.rank)
    ]
    x, labels = model.batch(2 * plan.micro_batches)
    _, wanted = model.reference(plan.stages, x, labels, blocks=1)
    called: list[str] = []

    def pair(step: Any, action: Any) -> None:
        called.append(str(action))
        for part in reversed(action.sub_actions):
            step.run_default(part)

    with Schedule(plan, stages, timeout=TIMEOUT) as schedule:
        schedule.register(Kind.OVERLAP_F_B, pair)
        _, gradients = train(schedule, x, labels)
        pairs = [str(action) for action in schedule.plan.rows[world.rank] if action.kind is Kind.OVERLAP_F_B]
        return {
            "error": model.error(schedule.parameters(), gradients, wanted),
            "called": called,
            "pairs": pairs,
        }


def other_plan(world: communication.World) -> dict:
    """One rank has another plan: all are told where it differs, before anything runs."""
    plan = make_plan("1f1b", world.size, MICRO_BATCHES)
    if world.rank == 1:
        plan = make_plan("gpipe", world.size, MICRO_BATCHES)
    stage = PipelineStage(model.piece(world.rank, world.size), world.rank, world.size)
    try:
        Schedule(plan, stage, timeout=TIMEOUT)
    except PipelineError as error:
        return {"message": str(error)}
    return {"message": ""}


def wrong_stage(world: communication.World) -> dict:
    """One rank has the wrong stage: all are told."""
    index = 0 if world.rank == 2 else world.rank
    stage = PipelineStage(model.piece(index, world.size), index, world.size)
    try:
        Schedule1F1B(stage, MICRO_BATCHES, timeout=TIMEOUT)
    except PipelineError as error:
        return {"message": str(error)}
    return {"message": ""}


def run_plan(world: communication.World, plan: Plan) -> dict:
    """Train one step by a plan that no class has a name for."""
    stages = [
        PipelineStage(model.piece(index, plan.stages, checkpoint_wrapper, blocks=1), index, plan.stages)
        for index in plan.placement.stages_of(world.rank)
    ]
    x, labels = model.batch(2 * plan.micro_batches)
    _, wanted = model.reference(plan.stages, x, labels, blocks=1)
    with Schedule(plan, stages, timeout=TIMEOUT) as schedule:
        gradients = train(schedule, x, labels)[1]
        return {
            "error": model.error(schedule.parameters(), gradients, wanted),
            "ran": [str(event.action) for event in schedule.trace],
            "row": [str(action) for action in schedule.plan.rows[world.rank]],
        }


def from_csv(world: communication.World) -> dict:
    """A plan from text."""
    return run_plan(world, Plan.from_csv(make_plan("zb-v", world.size, 2 * world.size).to_csv()))


def from_auto(world: communication.World) -> dict:
    """A searched plan with pre-fired recompute, for uneven stages, two on each rank."""
    costs = Costs(forward=(1, 2, 1, 1, 3, 1, 1, 2))
    found = auto(world.size, 2 * world.size, costs, stages=2 * world.size, recompute=("prefire",), effort=0.1)
    return run_plan(world, found.plan)


CASES = (
    changing_shapes,
    mixed_values,
    unused_output,
    shared_parameters,
    several_runs,
    pipeline_times_data,
    hooks,
    other_plan,
    wrong_stage,
    from_csv,
    from_auto,
)


def run_all(world: communication.World) -> dict[str, dict]:
    """Run every case; results by name."""
    return {case.__name__: case(world) for case in CASES}
