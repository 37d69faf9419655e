"""Stacks of small blocks: the ways to put excluded regions into a checkpointed block, and the plain program of each.

A block is drawn from `KINDS`. Its kind's function says what it computes from the block's weights and regions. The plain
program calls the same functions without any wrapper.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore import autograd

WIDTH = 4

Arrays = list[Optional[np.ndarray]]


class Counted:
    """A function that counts its executions."""

    def __init__(self, fn: Callable, name: str) -> None:
        self.fn = fn
        self.runs = 0
        self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.fn(*args, **kwargs)


class Block:
    """One block: its weights, its regions (wrapped or not) and its body.

    Args:
        kind: one of `KINDS`.
        rng: makes the weights.
        wrapped: whether the body is a checkpointed block and the regions are excluded.
    """

    def __init__(self, kind: Callable, rng: np.random.Generator, wrapped: bool) -> None:
        self._rng = rng
        self._wrapped = wrapped
        self.weights = [self._weight((WIDTH, WIDTH)), self._weight((WIDTH, WIDTH)), self._weight((WIDTH,))]
        self.regions: list[Counted] = []
        self._wrappers: dict[Any, Callable] = {}
        self.body = Counted(lambda x: kind(self, x), kind.__name__)
        self.call = checkpoint_wrapper(self.body) if wrapped else self.body

    def _weight(self, shape: tuple[int, ...]) -> Parameter:
        values = self._rng.standard_normal(shape).astype(np.float32) * 0.6
        return Parameter(Tensor(values), name=f"weight{len(values)}")

    def region(self, fn: Callable, name: Any = 0, save_output: bool | str = True) -> Callable:
        """The region of this name, made at its first use: `fn` with a weight of its own in front."""
        if name not in self._wrappers:
            weight = self._weight((WIDTH, WIDTH))
            self.weights.append(weight)
            counted = Counted(lambda *args, **kwargs: fn(weight, *args, **kwargs), f"region {name}")
            self.regions.append(counted)
            exclude = checkpoint_exclude_wrapper if self._wrapped else lambda region, save_output: region
            self._wrappers[name] = exclude(counted, save_output=save_output)
        return self._wrappers[name]


def _norm(block: Block, x: Tensor) -> Tensor:
    return x * ops.rsqrt((x * x).mean(-1, True) + 1e-3) * block.weights[2]


def _linear(weight: Parameter, x: Tensor) -> Tensor:
    return mint.matmul(x, weight)


def _gated(weight: Parameter, x: Tensor) -> Tensor:
    return mint.matmul(ops.tanh(x), weight) * x


def _experts(weight: Parameter, tokens: dict[str, Any], scale: float, more: Sequence[Tensor]) -> OrderedDict[str, Any]:
    mixed = mint.matmul(tokens["x"] * scale, weight)
    return OrderedDict(mixed=mixed, pair=(mixed * more[0], [tokens["count"], more[1] + mixed]))


def mlp(block: Block, x: Tensor) -> Tensor:
    """No region; a weight used twice."""
    h = mint.matmul(ops.relu(mint.matmul(_norm(block, x), block.weights[0])), block.weights[1])
    return x + mint.matmul(h, block.weights[1])


def one_region(block: Block, x: Tensor) -> Tensor:
    """A region between operators."""
    h = block.region(_linear)(_norm(block, x))
    return x + mint.matmul(ops.tanh(h), block.weights[0]) * h


def region_alone(block: Block, x: Tensor) -> Tensor:
    """Nothing but a region."""
    return block.region(_gated)(x)


def chain(block: Block, x: Tensor) -> Tensor:
    """Three regions, the outputs of the first two not saved."""
    h = block.region(_gated, 0, False)(_norm(block, x))
    h = block.region(_linear, 1, False)(h)
    return x + block.region(_gated, 2)(h) * block.weights[2]


def auto_chain(block: Block, x: Tensor) -> Tensor:
    """A chain that finds out by itself that it is one."""
    h = block.region(_linear, 0, "auto")(_norm(block, x))
    return ops.sin(block.region(_gated, 1)(h)) + mint.matmul(x, block.weights[0])


def several_calls(block: Block, x: Tensor) -> Tensor:
    """One region called three times, its output used by operators and by itself."""
    region = block.region(_gated)
    h = region(_norm(block, x))
    h = region(h) + mint.matmul(h, block.weights[0])
    return x + region(h) * block.weights[2]


def views(block: Block, x: Tensor) -> Tensor:
    """Regions that take views: a transposed tensor, a slice, one part of a split, a reshape and back."""
    h = mint.matmul(x, block.weights[0])
    first, _ = mint.split(mint.cat((h, x), 0), h.shape[0], 0)
    turned = block.region(_gated, 0)(h.reshape(-1, WIDTH, WIDTH).transpose(0, 2, 1)).reshape(-1, WIDTH)
    parts = block.region(_linear, 1)(first) * block.region(_linear, 2)(mint.cat((x, h), 0)[h.shape[0] :])
    return x + turned * parts


def containers(block: Block, x: Tensor) -> Tensor:
    """A region that takes and returns nests with constants in them."""
    h = mint.matmul(_norm(block, x), block.weights[1])
    out = block.region(_experts)({"x": h, "count": 3}, scale=0.5, more=(x, h * x))
    product, (count, total) = out["pair"]
    return x + out["mixed"] * ops.tanh(product) + total * (1.0 / count)


KINDS = (mlp, one_region, region_alone, chain, auto_chain, several_calls, views, containers)


class Stack:
    """Blocks one after the other."""

    def __init__(self, kinds: Sequence[Callable], wrapped: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.blocks = [Block(kind, rng, wrapped) for kind in kinds]
        self(Tensor(np.ones((WIDTH, WIDTH), np.float32)))  # makes the regions' weights
        self.forget_runs()

    def __call__(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.call(x)
        return x

    @property
    def weights(self) -> list[Parameter]:
        """The weights of all blocks."""
        return [weight for block in self.blocks for weight in block.weights]

    def forget_runs(self) -> None:
        """Count executions from here."""
        for counted in [block.body for block in self.blocks] + [r for block in self.blocks for r in block.regions]:
            counted.runs = 0

    def runs(self) -> tuple[list[int], list[int]]:
        """Executions of the bodies of blocks, and of those of regions."""
        return [b.body.runs for b in self.blocks], [region.runs for b in self.blocks for region in b.regions]


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    """An input that needs a gradient, and a gradient for the output. Shape [8, WIDTH]."""
    rng = np.random.default_rng(100 + number)
    x, grad = (Tensor(rng.standard_normal((2 * WIDTH, WIDTH)).astype(np.float32)) for _ in range(2))
    x.requires_grad_()
    return x, grad


def plain_gradients(stack: Stack, number: int) -> tuple[np.ndarray, Arrays]:
    """The gradients of input and weights for one micro-batch, by one backward of the engine."""
    x, grad = micro_batch(number)
    with autograd.recording():
        output = stack(x)
    found = autograd.run_backward([output], [grad], [x, *stack.weights], keep_graph=False)
    arrays = [None if one is None else one.asnumpy() for one in found]
    return arrays[0], arrays[1:]


def added(parts: Sequence[Arrays]) -> Arrays:
    """The sums of the gradients, weight by weight, in the order given."""
    sums = parts[0]
    for part in parts[1:]:
        sums = [None if one is None else one + other for one, other in zip(sums, part)]
    return sums
