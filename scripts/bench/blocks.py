"""The models of the split bench: plain layers, residual MLP blocks with and without a norm, transformer blocks."""

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
    """x + W2 relu(W1 norm(x)), four times as wide inside; the norm only where asked for. x: [tokens, width]."""

    def __init__(self, rng: np.random.Generator, width: int, normed: bool = False) -> None:
        super().__init__()
        self.norm = RmsNorm(width) if normed else nn.Identity()
        self.up = linear(rng, width, 4 * width)
        self.down = linear(rng, 4 * width, width)

    def construct(self, x: Tensor) -> Tensor:
        return x + self.down(ops.relu(self.up(self.norm(x))))


class TransformerBlock(nn.Cell):
    """Attention within sequences and a gelu MLP, each after a layer norm and with a residual. x: [tokens, width].

    Args:
        rng: makes the weights.
        width: of the model.
        heads: how many heads attend.
        length: of a sequence; the tokens of x are one sequence after the other.
    """

    def __init__(self, rng: np.random.Generator, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.length = length
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
        mixed = mixed.reshape(-1, self.heads, self.length, mixed.shape[-1])
        return self.out(mixed.swapaxes(1, 2).reshape(tokens, width))

    def _heads(self, x: Tensor) -> Tensor:
        parts = x.reshape(-1, self.length, self.heads, x.shape[1] // self.heads).swapaxes(1, 2)
        return parts.reshape(-1, self.length, parts.shape[-1])


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
    make, count, shape = _MODELS[case]
    rng = np.random.default_rng(0)
    return Stack([make(rng, shape[1]) for _ in range(count)], wrapper), shape


_MODELS: dict[str, tuple[Callable[..., nn.Cell], int, tuple[int, int]]] = {
    "layers-1024": (lambda rng, width: linear(rng, width, width), 6, (1024, 1024)),
    "mlp-256": (MlpBlock, 8, (256, 256)),
    "mlp-1024": (MlpBlock, 8, (256, 1024)),
    "mlp-norm-256": (lambda rng, width: MlpBlock(rng, width, normed=True), 8, (256, 256)),
    "mlp-norm-1024": (lambda rng, width: MlpBlock(rng, width, normed=True), 8, (256, 1024)),
    "transformer-768": (lambda rng, width: TransformerBlock(rng, width, 12, 512), 1, (512, 768)),
    "transformer-4096": (lambda rng, width: TransformerBlock(rng, width, 32, 128), 1, (256, 4096)),
}
"""Per case: what makes a block of a width, how many there are, the shape of the input (tokens, width)."""

CASES = tuple(_MODELS)
