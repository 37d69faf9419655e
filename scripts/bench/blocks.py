"""The models of the split and retention benches: plain layers, residual MLP blocks, a transformer block."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

Wrapper = Callable[[nn.Cell], Callable[..., Tensor]]


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    """A float32 tensor of normal values."""
    return Tensor((rng.standard_normal(shape) * scale).astype(np.float32))


def linear(rng: np.random.Generator, width: int, outputs: int, has_bias: bool = False) -> nn.Dense:
    """A layer without activation. nn.Dense multiplies by its weight transposed; a transposed view is copied on CPU."""
    return nn.Dense(width, outputs, weight_init=normal(rng, outputs, width, scale=width**-0.5), has_bias=has_bias)


class RmsNorm(nn.Cell):
    """x / sqrt(mean(x^2)) * scale, from plain operators: CPU has no fused one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.ones(width, np.float32)), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt(ops.mean(x * x, -1, True) + 1e-6) * self.scale


class MlpBlock(nn.Cell):
    """x + W2 relu(W1 rmsnorm(x)), four times as wide inside. x: [tokens, width]."""

    def __init__(self, rng: np.random.Generator, width: int) -> None:
        super().__init__()
        self.norm = RmsNorm(width)
        self.up = linear(rng, width, 4 * width)
        self.down = linear(rng, 4 * width, width)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.relu(self.up(self.norm(x))))


class TransformerBlock(nn.Cell):
    """Attention over one sequence and a gelu MLP, each after a layer norm and with a residual. x: [tokens, width]."""

    def __init__(self, rng: np.random.Generator, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.CellList([nn.LayerNorm((width,)), nn.LayerNorm((width,))])
        self.query_key_value = linear(rng, width, 3 * width, has_bias=True)
        self.out = linear(rng, width, width, has_bias=True)
        self.up = linear(rng, width, 4 * width, has_bias=True)
        self.down = linear(rng, 4 * width, width, has_bias=True)

    def construct(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.norms[0](x))
        return x + self.down(ops.gelu(self.up(self.norms[1](x))))

    def _attention(self, x: Tensor) -> Tensor:
        tokens, width = x.shape
        query, key, value = (self._heads(part) for part in mint.split(self.query_key_value(x), width, -1))
        scores = mint.bmm(query, key.swapaxes(-1, -2)) * (1 / math.sqrt(width // self.heads))
        mixed = mint.bmm(ops.softmax(scores, -1), value)
        return self.out(mixed.swapaxes(0, 1).reshape(tokens, width))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], self.heads, -1).swapaxes(0, 1)


class Stack(nn.Cell):
    """Blocks one after the other, each called through `wrapper` (the identity, or a checkpoint)."""

    def __init__(self, blocks: list[nn.Cell], wrapper: Wrapper) -> None:
        super().__init__()
        self.blocks = nn.CellList(blocks)
        self.calls = [wrapper(block) for block in blocks]

    def construct(self, x: Tensor) -> Tensor:
        for call in self.calls:
            x = call(x)
        return x


def model(case: str, wrapper: Wrapper) -> tuple[Stack, tuple[int, ...]]:
    """The model of a case, and the shape of its input.

    Raises:
        KeyError: there is no such case.
    """
    rng = np.random.default_rng(0)
    blocks, shape = {
        "layers-1024": lambda: ([linear(rng, 1024, 1024) for _ in range(6)], (1024, 1024)),
        "mlp-256": lambda: ([MlpBlock(rng, 256) for _ in range(8)], (256, 256)),
        "mlp-1024": lambda: ([MlpBlock(rng, 1024) for _ in range(8)], (256, 1024)),
        "transformer": lambda: ([TransformerBlock(rng, 768, 12)], (512, 768)),
    }[case]()
    return Stack(blocks, wrapper), shape


CASES = ("layers-1024", "mlp-256", "mlp-1024", "transformer")
