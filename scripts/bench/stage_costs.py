"""Measure what each stage of the training model costs, as a cost file for ``python -m pipeline``.

    python scripts/bench/stage_costs.py --layers 6 --stages 4 --out costs.json

One process runs the stages one after the other. Times are medians in ms: forward, dx and dw of stages that keep their
activations, recompute of stages whose blocks are checkpointed with the expert matmuls excluded. Memory is what one
micro-batch keeps alive, in MiB: `checkpoint_input` has what the excluded regions keep in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore.memory import MIB, MemoryMeter, memory_meter
from pipeline.execution.chunk import Chunk
from scripts.training.model import ModelShape, StageModel

_HELD = 4  # micro-batches alive at once when memory is measured: one alone is too small to see


class MeasuredStage:
    """One stage with an input for it, with or without checkpointed blocks."""

    def __init__(self, shape: ModelShape, stage: int, stages: int, batch: int, checkpointed: bool) -> None:
        wrappers = {"checkpoint": checkpoint_wrapper, "exclude": checkpoint_exclude_wrapper} if checkpointed else {}
        self.model = StageModel(shape, stage, stages, "CPU", **wrappers)
        self.stage, self.last = stage, stage == stages - 1
        generator = np.random.default_rng(stage)
        tokens = Tensor(generator.integers(0, shape.vocabulary, (batch, shape.length)).astype(np.int32))
        hidden = Tensor(generator.standard_normal((batch, shape.length, shape.width)).astype(np.float32))
        hidden.requires_grad_()
        self.inputs = (tokens if stage == 0 else hidden, *((tokens,) if self.last else ()))
        self.grads = None if self.last else ms.ops.ones_like(hidden)

    def forward(self) -> Chunk:
        """A new chunk after its forward."""
        chunk = Chunk(self.stage, 0, list(self.model.trainable_params()))
        chunk.forward(self.model, *self.inputs)
        return chunk


def times_of(plain: MeasuredStage, checkpointed: MeasuredStage, repeats: int) -> dict[str, float]:
    """Medians in ms."""
    found: dict[str, list[float]] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        found.setdefault(name, []).append(1e3 * (time.perf_counter() - start))
        return result

    for _ in range(repeats + 2):
        chunk = timed("forward", plain.forward)
        timed("backward_input", lambda chunk=chunk: chunk.backward_input(plain.grads))
        timed("backward_weight", chunk.backward_weight)
        chunk = checkpointed.forward()
        timed("recompute", chunk.recompute)
        chunk.backward(checkpointed.grads)
    # The first two runs compile and fill caches.
    return {name: round(statistics.median(values[2:]), 3) for name, values in found.items()}


def memory_of(plain: MeasuredStage, checkpointed: MeasuredStage, meter: MemoryMeter) -> dict[str, float]:
    """MiB per micro-batch."""
    empty = meter.alive_bytes()
    chunks = [plain.forward() for _ in range(_HELD)]
    activation = meter.alive_bytes() - empty
    for chunk in chunks:
        chunk.backward_input(plain.grads)
    pending = meter.alive_bytes() - empty
    for chunk in chunks:
        chunk.backward_weight()
    del chunk
    chunks.clear()
    empty = meter.alive_bytes()
    chunks = [checkpointed.forward() for _ in range(_HELD)]
    kept = meter.alive_bytes() - empty
    for chunk in chunks:
        chunk.recompute()
    recomputed = meter.alive_bytes() - empty - kept
    for chunk in chunks:
        chunk.release()
    found = {"activation": activation, "pending_weight": pending, "checkpoint_input": kept, "recomputed": recomputed}
    return {name: round(max(held, 0) / _HELD / MIB, 2) for name, held in found.items()}


def main() -> int:
    """Measure every stage and write the cost file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("stages", 4), ("width", 256), ("length", 128), ("batch", 4), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write here instead of printing")
    args = parser.parse_args()
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    ms.runtime.launch_blocking()
    shape = ModelShape(layers=args.layers, width=args.width, length=args.length, expert_width=2 * args.width)
    meter = memory_meter()
    content: dict[str, Any] = {"unit": "ms", "memory": {}}
    for stage in track(range(args.stages), "stages", console=Console(stderr=True), transient=True):
        pair = [MeasuredStage(shape, stage, args.stages, args.batch, wrapped) for wrapped in (False, True)]
        for name, value in times_of(*pair, args.repeats).items():
            content.setdefault(name, []).append(value)
        for name, value in memory_of(*pair, meter).items():
            content["memory"].setdefault(name, []).append(value)
    text = json.dumps(content, indent=1)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
