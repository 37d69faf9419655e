"""One step of the training job, its gradients written to a file instead of being given to the optimizer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import mindspore
import numpy as np

from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from pipeline.launch import mark_finished
from scripts.training.train import Worker


def main() -> None:
    """The argument is an ``options.json``."""
    end_with_parent()
    options = argparse.Namespace(**json.loads(Path(sys.argv[1]).read_text()))
    target = prepare_process()
    world = communication.init(target)
    worker = Worker(options, target, world)
    inputs, labels = worker.text.batch(1, options.batch)
    worker.schedule.run(mindspore.Tensor(inputs), labels=mindspore.Tensor(labels))
    names = [weight.name for weight in worker.schedule.parameters()]
    gradients = {name: gradient.asnumpy() for name, gradient in zip(names, worker.schedule.gradients())}
    np.savez(worker.out / f"gradients-{world.rank}.npz", **gradients)
    worker.schedule.close()
    mark_finished(world.rank)


if __name__ == "__main__":
    main()
