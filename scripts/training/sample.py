"""Let the trained model write some text: all stages' checkpoint files in one process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import numpy as np

from hyper_parallel.platform.mindspore.environment import prepare_process
from scripts.training import checkpoint

__all__ = ["main", "write"]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Write ``sample.txt`` into the output folder of a job, and the text to the terminal."""
    parser = argparse.ArgumentParser(description="Let a trained model write text.")
    parser.add_argument("--out", type=Path, required=True, help="output folder of a training job")
    parser.add_argument("--bytes", type=int, default=200, help="how many bytes to write")
    parser.add_argument("--prompt", default="def ", help="text to go on from")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 takes the likeliest byte each time")
    options = parser.parse_args(arguments)
    text = options.prompt + write(options.out, options.prompt, options.bytes, options.temperature)
    (options.out / "sample.txt").write_text(text)
    print(text)
    return 0


def write(out: Path, prompt: str, count: int, temperature: float, seed: int = 1) -> str:
    """Return ``count`` bytes that the newest checkpoint under ``out`` writes after ``prompt``."""
    target = prepare_process()

    import mindspore
    from mindspore import Tensor

    from scripts.training.model import ModelShape, StageModel

    folder = out / "checkpoints"
    manifest = checkpoint.read_manifest(folder)
    model = StageModel(ModelShape(**manifest["model"]), target=target)
    for stage in range(manifest["stages"]):
        mindspore.load_param_into_net(model, checkpoint.load_stage(folder, manifest["step"], stage))
    model.set_train(False)
    generator = np.random.Generator(np.random.PCG64(seed))
    length, written = model.shape.length, list(prompt.encode()) or [ord("\n")]
    start = len(written)
    while len(written) < start + count:
        window = written[-length:]
        inputs = np.zeros((1, length), np.int32)
        inputs[0, : len(window)] = window
        logits = model.logits(model.hidden_states(Tensor(inputs))).asnumpy()[0, len(window) - 1]
        written.append(_draw(logits, temperature, generator))
    return bytes(written[start:]).decode(errors="replace")


def _draw(logits: np.ndarray, temperature: float, generator: np.random.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    scaled = (logits - logits.max()).astype(np.float64) / temperature
    odds = np.exp(scaled) / np.exp(scaled).sum()
    return int(generator.choice(len(odds), p=odds))


if __name__ == "__main__":
    sys.exit(main())
