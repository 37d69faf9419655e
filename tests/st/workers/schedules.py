"""Every schedule on real ranks, with checkpointed blocks and an excluded region: gradients, executions and order."""

from __future__ import annotations

import numpy as np

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore import communication
from pipeline import PipelineStage, Schedule
from pipeline.plan import SCHEDULES, insert_recompute, make_plan, split_backward
from tests.st.workers import model

MICRO_BATCHES = 8
BLOCKS = 16


def checkpointed(block: model.Block) -> model.Block:
    """The block with its second product excluded from the replay."""
    block.down = checkpoint_exclude_wrapper(block.down)
    return checkpoint_wrapper(block)


def cases() -> list[tuple[str, str, bool]]:
    """(schedule, recompute mode, split): everything split and pre-fired, and the whole backwards lazily too."""
    return [(name, "prefire", True) for name in SCHEDULES] + [("gpipe", "lazy", False), ("1f1b", "lazy", False)]


def run_all(world: communication.World) -> dict[str, dict]:
    """Run every case; results by name."""
    x, labels = model.batch(2 * MICRO_BATCHES)
    loss, wanted = model.reference(BLOCKS, x, labels, blocks=1)
    results = {}
    for name, recompute, split in cases():
        result = run_case(world, name, recompute, split, (x, labels), wanted)
        results[f"{name} {recompute}"] = {**result, "wanted_loss": loss}
    return results


def run_case(
    world: communication.World, name: str, recompute: str, split: bool, batch: tuple, wanted: dict[str, np.ndarray]
) -> dict:
    """Train two steps with one schedule; report what the second one did."""
    plan = make_plan(name, world.size, MICRO_BATCHES)
    plan = insert_recompute(split_backward(plan) if split else plan, recompute)
    blocks: list[model.Block] = []

    def wrap(block: model.Block) -> model.Block:
        blocks.append(block)
        return checkpointed(block)

    stages = [
        PipelineStage(model.piece(index, plan.stages, wrap, BLOCKS // plan.stages), index, plan.stages)
        for index in plan.placement.stages_of(world.rank)
    ]
    schedule = Schedule(plan, stages, timeout=60.0)
    for _ in range(2):
        losses = schedule.run(batch[0], labels=batch[1])
        gradients = schedule.gradients()
    chunks = 2 * MICRO_BATCHES
    result = {
        "loss": float(np.mean([float(loss) for loss in losses])) if losses else None,
        "error": model.error(schedule.parameters(), gradients, wanted),
        "block_runs": sorted({block.runs / chunks for block in blocks}),
        "excluded_runs": sorted({block.down.runs / chunks for block in blocks}),
        "ran": [str(event.action) for event in schedule.trace],
        "row": [str(action) for action in schedule.plan.rows[world.rank]],
        "pending": schedule.pending(),
    }
    schedule.close()
    return result
