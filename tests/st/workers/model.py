"""A small residual model for the multi-process tests, cut into stages, and its gradients in one process."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

WIDTH = 16


def labelled(label: str, values: np.ndarray) -> Parameter:
    """A parameter with a label of its own: Cells change names to tell where in them a parameter is."""
    parameter = Parameter(Tensor(values), name=label)
    parameter.label = label
    return parameter


class Linear(nn.Cell):
    """x w, and how often it ran."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        values = np.random.RandomState(seed).randn(WIDTH, WIDTH).astype(np.float32) / WIDTH**0.5
        self.weight = labelled(name, values)
        self.runs = 0

    def construct(self, x: Tensor) -> Tensor:
        self.runs += 1
        return mint.matmul(x, self.weight)


class Block(nn.Cell):
    """x + tanh(x u) v, and how often it ran."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = Linear(f"up{number}", 2 * number)
        self.down = Linear(f"down{number}", 2 * number + 1)
        self.runs = 0

    def construct(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.down(mint.tanh(self.up(x)))


class Piece(nn.Cell):
    """Some blocks in a row; the last piece returns the loss."""

    def __init__(self, blocks: list, is_last: bool) -> None:
        super().__init__()
        self.blocks = nn.CellList(blocks)
        self.is_last = is_last

    def construct(self, x: Tensor, labels: Tensor = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x - labels) ** 2).mean() if self.is_last else x


def piece(stage: int, stages: int, wrap=lambda block: block, blocks: int = 2) -> Piece:
    """The blocks of one stage, each wrapped."""
    numbers = range(stage * blocks, (stage + 1) * blocks)
    return Piece([wrap(Block(number)) for number in numbers], stage == stages - 1)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    random = np.random.RandomState(1000 + seed)
    return tuple(Tensor(random.randn(rows, WIDTH).astype(np.float32)) for _ in range(2))


def reference(stages: int, x: Tensor, labels: Tensor, blocks: int = 2) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by label, from one process without checkpointing."""
    pieces = [piece(stage, stages, blocks=blocks) for stage in range(stages)]

    def forward(x: Tensor) -> Tensor:
        for part in pieces[:-1]:
            x = part(x)
        return pieces[-1](x, labels)

    weights = [weight for part in pieces for weight in part.trainable_params()]
    loss, gradients = ms.value_and_grad(forward, None, weights)(x)
    return float(loss), {weight.label: gradient.asnumpy() for weight, gradient in zip(weights, gradients)}


def error(weights: tuple, gradients: tuple, wanted: dict[str, np.ndarray]) -> float:
    """The largest difference to the gradients wanted, relative to the largest one of the same parameter."""
    return max(
        float(np.abs(gradient.asnumpy() - wanted[weight.label]).max() / np.abs(wanted[weight.label]).max())
        for weight, gradient in zip(weights, gradients)
    )
