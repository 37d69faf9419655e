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
from pathlib import Path
from typing import Any, Optional

import mindspore
from mindspore import nn

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import end_with_parent, peak_memory_mib, prepare_process
from pipeline import PipelineStage, Schedule1F1B, ScheduleGPipe
from pipeline.launch import mark_failed, mark_finished
from scripts.training import checkpoint, report
from scripts.training.data import Text
from scripts.training.learning_rate import WarmUpThenInverseSquareRoot
from scripts.training.model import ModelShape, StageModel
from scripts.training.options import model_sizes


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
        mark_failed(world.rank, error, stage=world.rank)
        sys.stderr.flush()
        os._exit(1)
    mark_finished(world.rank)


class Worker:
    """A stage with its data, optimizer and place in the pipeline."""

    def __init__(self, options: argparse.Namespace, target: str, world: Any) -> None:
        self.options, self.target, self.world = options, target, world
        self.out = Path(options.out)
        self.sizes = model_sizes(options)
        self.model = StageModel(
            ModelShape(**self.sizes), world.rank, options.stages, target, checkpoint_wrapper, checkpoint_exclude_wrapper
        )
        self.text = Text(Path(options.data), options.length, options.seed)
        self.stage = PipelineStage(self.model, world.rank, options.stages)
        rate = WarmUpThenInverseSquareRoot(options.learning_rate)
        self.optimizer = nn.AdamWeightDecay(self.stage.weights, rate, weight_decay=0.01)
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[options.schedule]
        self.schedule = kind(self.stage, options.micro_batches)

    def _inputs(self, batch: tuple[Any, Any]) -> tuple[Any, ...]:
        return tuple(mindspore.Tensor(part) for part in batch)

    def train(self) -> None:
        """Do the steps that are left, then write what this rank saw."""
        runs = {"blocks": [0] * len(self.model.blocks), "excluded": [0] * 2 * len(self.model.blocks)}
        first = self._resume()
        for step in range(first + 1, self.options.steps + 1):
            before = self.model.runs()
            start = time.monotonic()
            loss = self._step(step)
            seconds = time.monotonic() - start
            for kind, counts in self.model.runs().items():
                runs[kind] = [total + now - then for total, now, then in zip(runs[kind], counts, before[kind])]
            self._note(step, loss, seconds, self._validate(step))
            if step == self.options.steps or step % self.options.checkpoint_every == 0:
                self._save(step)
        self._report(runs, (self.options.steps - first) * self.options.micro_batches)

    def _step(self, step: int) -> Optional[float]:
        """Train on one batch; return the loss on the last stage, None on the others."""
        loss = self.schedule.run(*self._inputs(self.text.batch(step, self.options.batch)))
        self.optimizer(self.stage.gradients())
        self.stage.clear_gradients()
        return float(loss.asnumpy()) if self.stage.is_last else None

    def _validate(self, step: int) -> Optional[float]:
        """Return the loss on the held-out text where it is due and known."""
        if step != self.options.steps and step % self.options.validate_every:
            return None
        loss = self.schedule.evaluate(*self._inputs(self.text.validation(self.options.batch)))
        return float(loss.asnumpy()) if self.stage.is_last else None

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
        checkpoint.save_stage(folder, step, self.stage.stage_index, self.optimizer.get_parameters())
        communication.barrier(self.world)
        if self.world.rank % self.options.workers == 0:
            checkpoint.seal(folder, step, self.sizes, self.options.stages)
        communication.barrier(self.world)

    def _resume(self) -> int:
        """Load the newest step that rank 0 has, and return it; 0 for a new job."""
        if not self.options.resume:
            return 0
        folder = self.out / "checkpoints"
        own = checkpoint.read_manifest(folder)["step"]
        step = int(communication.broadcast(self.world, mindspore.Tensor([own], mindspore.int32), 0).asnumpy()[0])
        parameters = checkpoint.load_stage(folder, step, self.stage.stage_index)
        missing, _ = mindspore.load_param_into_net(self.optimizer, parameters, strict_load=True)
        if missing:
            raise checkpoint.CheckpointError(f"step {step} in {folder} lacks {', '.join(missing[:3])}: start afresh")
        return step

    def _report(self, runs: dict[str, list[int]], micro_batches: int) -> None:
        (self.out / "ranks").mkdir(exist_ok=True)
        record = {
            "rank": self.world.rank,
            "stage": self.stage.stage_index,
            "micro_batches": micro_batches,
            "runs": runs,
            "peak_memory_mib": peak_memory_mib(self.target),
        }
        report.write_json(self.out / "ranks" / f"rank-{self.world.rank}.json", record)


if __name__ == "__main__":
    main()
