"""One worker of the training job: one stage of the model. Started by msrun, once per rank.

The argument is the ``options.json`` that the launcher wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import mindspore
from mindspore import nn

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import end_with_parent, peak_memory_mib, prepare_process
from pipeline import PipelineStage, Schedule
from pipeline.execution.trace import to_rows
from pipeline.launch import mark_failed, mark_finished
from pipeline.plan import insert_recompute
from scripts.training import checkpoint, report
from scripts.training.data import Text
from scripts.training.learning_rate import WarmUpThenInverseSquareRoot
from scripts.training.model import ModelShape, StageModel
from scripts.training.options import model_sizes, plan_of


def main() -> None:
    """Join the other workers, train, and tell the launcher how it ended."""
    end_with_parent()
    options = argparse.Namespace(**json.loads(Path(sys.argv[1]).read_text()))
    target = prepare_process()
    world = communication.init(target)
    try:
        Worker(options, target, world).train()
    except BaseException as error:
        traceback.print_exc()
        mark_failed(world.rank, error)
        sys.stderr.flush()
        os._exit(1)
    mark_finished(world.rank)


class Worker:
    """A stage with its data, optimizer and place in the pipeline."""

    def __init__(self, options: argparse.Namespace, target: str, world: Any) -> None:
        self.options, self.target, self.world = options, target, world
        self.out = Path(options.out)
        self.sizes = model_sizes(options)
        plan = insert_recompute(plan_of(options), options.recompute)
        self.models = [
            StageModel(
                ModelShape(**self.sizes), stage, plan.stages, target, checkpoint_wrapper, checkpoint_exclude_wrapper
            )
            for stage in plan.placement.stages_of(world.rank)
        ]
        stages = [PipelineStage(model, model.stage, plan.stages) for model in self.models]
        self.schedule = Schedule(plan, stages, world=world, timeout=options.time_out)
        self.text = Text(Path(options.data), options.length, options.seed)
        rate = WarmUpThenInverseSquareRoot(options.learning_rate)
        self.optimizer = nn.AdamWeightDecay(self.schedule.parameters(), rate, weight_decay=0.01)

    def train(self) -> None:
        """Do the steps that are left, then write what this rank saw."""
        first = self._resume()
        runs: Counter[str] = Counter()
        for step in range(first + 1, self.options.steps + 1):
            before = self._runs()
            start = time.monotonic()
            loss = self._step(step)
            seconds = time.monotonic() - start
            runs.update({name: count - before[name] for name, count in self._runs().items()})
            self._note(step, loss, seconds, self._validate(step))
            if step == self.options.steps or step % self.options.checkpoint_every == 0:
                self._save(step)
        self._report(runs, (self.options.steps - first) * self.options.micro_batches)
        self.schedule.close()

    def _step(self, step: int) -> Optional[float]:
        """Train on one batch; return the loss on the rank of the last stage, None on the others."""
        inputs, labels = self.text.batch(step, self.options.batch)
        losses = self.schedule.run(mindspore.Tensor(inputs), labels=mindspore.Tensor(labels))
        self.optimizer(self.schedule.gradients())
        return _mean(losses)

    def _validate(self, step: int) -> Optional[float]:
        """Return the loss on the held-out text where it is due and known."""
        if step != self.options.steps and step % self.options.validate_every:
            return None
        inputs, labels = self.text.validation(self.options.batch)
        return _mean(self.schedule.evaluate(mindspore.Tensor(inputs), labels=mindspore.Tensor(labels)))

    def _runs(self) -> dict[str, int]:
        """Return how often each counted cell of this rank has run so far."""
        return {name: count for model in self.models for name, count in model.runs().items()}

    def _note(self, step: int, loss: Optional[float], seconds: float, validation_loss: Optional[float]) -> None:
        """The last stage adds a line to the metrics."""
        if loss is None:
            return
        tokens = self.options.batch * self.options.length
        line = {"step": step, "loss": loss, "seconds": round(seconds, 4), "tokens_per_s": round(tokens / seconds, 1)}
        if validation_loss is not None:
            line["validation_loss"] = validation_loss
        with (self.out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _save(self, step: int) -> None:
        """Write this stage; when all are written, the first worker of each machine seals the step."""
        folder = self.out / "checkpoints"
        for model in self.models:
            checkpoint.save_stage(folder, step, model.stage, self._state_of(model))
        communication.barrier(self.world)
        if self.world.rank % self.options.workers == 0:
            checkpoint.seal(folder, step, self.sizes, self.options.stages)
        communication.barrier(self.world)

    def _state_of(self, model: StageModel) -> list[Any]:
        """Return a stage's weights, their optimizer state, and what belongs to no weight, as the step counter."""
        every = [weight.name for weight in self.schedule.parameters()]
        own = {weight.name for weight in model.trainable_params()}
        owner = {p.name: next((name for name in every if _of(p, name)), None) for p in self.optimizer.get_parameters()}
        return [p for p in self.optimizer.get_parameters() if owner[p.name] is None or owner[p.name] in own]

    def _resume(self) -> int:
        """Load the newest step that rank 0 has, and return it; 0 for a new job."""
        if not self.options.resume:
            return 0
        folder = self.out / "checkpoints"
        own = checkpoint.read_manifest(folder)["step"]
        step = int(communication.broadcast(self.world, mindspore.Tensor([own], mindspore.int32), 0).asnumpy()[0])
        parameters = {}
        for model in self.models:
            parameters.update(checkpoint.load_stage(folder, step, model.stage))
        missing, _ = mindspore.load_param_into_net(self.optimizer, parameters, strict_load=True)
        if missing:
            raise checkpoint.CheckpointError(f"step {step} in {folder} lacks {', '.join(missing[:3])}: start afresh")
        return step

    def _report(self, runs: Mapping[str, int], micro_batches: int) -> None:
        (self.out / "ranks").mkdir(exist_ok=True)
        record = {
            "rank": self.world.rank,
            "stages": [model.stage for model in self.models],
            "micro_batches": micro_batches,
            "runs": dict(runs),
            "plan": self.schedule.plan.name,
            "trace": to_rows(self.schedule.trace),
            "peak_memory_mib": peak_memory_mib(self.target),
        }
        if self.world.rank % self.options.workers == 0:
            (self.out / "plan.csv").write_text(self.schedule.plan.to_csv())
        report.write_json(self.out / "ranks" / f"rank-{self.world.rank}.json", record)


def _of(parameter: Any, weight: str) -> bool:
    """Whether a parameter is a weight or, as ``adam_m.<weight>``, its optimizer state."""
    return parameter.name == weight or parameter.name.endswith("." + weight)


def _mean(losses: Sequence[Any]) -> Optional[float]:
    return sum(float(loss.asnumpy()) for loss in losses) / len(losses) if losses else None


if __name__ == "__main__":
    main()
