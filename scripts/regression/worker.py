"""One rank of a job of the matrix: runs its cases one after the other and writes down what it saw. Started by msrun.

A case whose construction fails on some rank is left out by all ranks, and the next one follows. A case that fails while
messages are under way ends the job: the workers' channels cannot be trusted any more.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Optional

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from hyper_parallel.platform.mindspore.recompute import ENGINE_MODULE
from pipeline import PipelineStage, Schedule
from pipeline.execution.faults import Place
from scripts.regression.cases import Case
from scripts.regression.memory import ChunkSampler
from scripts.regression.models import Stage, data
from scripts.regression.reference import References
from scripts.workers import is_scheduler, reported

COUNTED_MODULES = ("pipeline.execution", "hyper_parallel", ENGINE_MODULE)


class Built:
    """A case, ready to run on this rank."""

    def __init__(self, case: Case, world: communication.World, references: References) -> None:
        plan = case.plan()
        indices = plan.placement.stages_of(world.rank)
        self.case = case
        self.reference = references.of(case, plan.stages)
        self.modules = [Stage(case, index, plan.stages) for index in indices]
        stages = [PipelineStage(module, index, plan.stages) for module, index in zip(self.modules, indices)]
        self.schedule = Schedule(plan, stages, world=world)
        self.inputs = data(case)

    def run(self) -> dict[str, Any]:
        """Run three steps and return what this rank saw: figures of the first, objects alive after the other two."""
        sampler = ChunkSampler(self.schedule)
        first = self._step()
        peaks = sampler.peaks()
        self._step()
        before = live_objects()
        last = self._step()
        return {
            **first,
            **peaks,
            "live": [before, live_objects()],
            "pending": self.schedule.pending(),
            "repeats": first["gradient_error"] == last["gradient_error"] and first["loss"] == last["loss"],
            "seconds": last["seconds"],
            "reference_seconds": self.reference.seconds,
        }

    def _step(self) -> dict[str, Any]:
        for module in self.modules:
            module.clear_runs()
        x, target = self.inputs
        start = time.perf_counter()
        losses = self.schedule.run(x, target=target)
        seconds = time.perf_counter() - start
        gradients = self.schedule.gradients()
        errors = {
            weight.name: relative_error(gradient.asnumpy(), self.reference.gradients[weight.name])
            for weight, gradient in zip(self.schedule.parameters(), gradients)
        }
        worst = max(errors, key=errors.__getitem__)
        loss = sum(map(float, losses)) / len(losses) if losses else None
        counts = [module.runs() for module in self.modules]
        return {
            "loss_error": None if loss is None else abs(loss - self.reference.loss) / abs(self.reference.loss),
            "loss": loss,
            "seconds": seconds,
            "gradient_error": errors[worst],
            "worst_gradient": worst,
            "blocks": [runs for count in counts for runs in count["blocks"]],
            "excluded": [runs for count in counts for runs in count["excluded"]],
        }

    def close(self) -> None:
        """Let go of the schedule."""
        self.schedule.close()


def relative_error(seen: np.ndarray, expected: np.ndarray) -> float:
    """The distance between two gradients over the length of the expected one."""
    distance = np.linalg.norm((seen - expected).ravel())
    return float(distance / max(np.linalg.norm(expected.ravel()), 1e-30))


def live_objects() -> dict[str, int]:
    """How many tensors, and how many objects of this project and of MindSpore's recompute, are alive.

    Not the places that the watching threads hand on: how many are under way is a matter of the moment.
    """
    gc.collect()
    found: Counter[str] = Counter()
    for candidate in gc.get_objects():
        kind = type(candidate)
        if kind is not Place and (issubclass(kind, Tensor) or str(kind.__module__).startswith(COUNTED_MODULES)):
            found[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return dict(found)


def build(case: Case, world: communication.World, references: References) -> tuple[Optional[Built], str]:
    """Build a case on all ranks: the case, or None and what went wrong here ("" if it went wrong elsewhere)."""
    built, problem = None, ""
    try:
        built = Built(case, world, references)
    except Exception:
        problem = traceback.format_exc()
    failed = Tensor(np.array([float(built is None)], np.float32))
    if float(communication.all_reduce(world, failed)[0]):
        if built:
            built.close()
        return None, problem
    return built, ""


def main() -> None:
    """Run the cases that the file named by the first argument lists."""
    cases = [Case.parse(name) for name in json.loads(Path(sys.argv[1]).read_text())]
    end_with_parent()
    prepare_process()
    world = communication.init()
    if is_scheduler():
        return
    references = References()
    answers = Path(sys.argv[1]).parent / f"answers.rank{world.rank}.jsonl"
    with reported(world.rank), answers.open("w") as file:
        gc.freeze()
        for case in cases:
            start = time.perf_counter()
            built, problem = build(case, world, references)
            answer = {"case": case.name, "rank": world.rank, "problem": problem}
            if built:
                answer.update(built.run())
                built.close()
                del built
            answer["case_seconds"] = time.perf_counter() - start
            file.write(json.dumps(answer) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
