"""Small models of three kinds, cut into stages. Each block, and each region that may be excluded, counts its runs.

All three have blocks `x + down(up(mixed))`: "region" excludes `down`, of the transformer its attention; "chain"
excludes `up` without keeping its output, and `down`, which takes that output whole.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore.operators import operators_for
from scripts.regression.cases import BLOCKS_PER_STAGE, Case
from scripts.training.model import Attention, ModelShape

WIDTH, INNER, LENGTH, HEADS, EXPERTS = 16, 32, 8, 2, 3
OPERATORS = operators_for("CPU")


def _drawn(name: str, *shape: int) -> Parameter:
    """A parameter of normal values that depend on its name alone, so a model is the same however it is cut."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) / shape[-2] ** 0.5
    return Parameter(Tensor(values.astype(np.float32)), name=name)


class Region(nn.Cell):
    """A piece of a block that counts its executions."""

    def __init__(self, body: Callable[..., Tensor], weights: Sequence[Parameter] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.body = body
        self.weights = ms.ParameterTuple(weights)
        self.runs = 0

    def construct(self, *args: Tensor) -> Tensor:
        """Run the body on the inputs and the weights."""
        self.runs += 1
        return self.body(*args, *self.weights)


def _up(x: Tensor, weight: Tensor) -> Tensor:
    return ops.relu(ops.matmul(x, weight))


def _experts_up(x: Tensor, weight: Tensor) -> Tensor:
    return OPERATORS.swiglu(ops.bmm(x, weight))


class Block(nn.Cell):
    """One block of a model of any kind."""

    def __init__(self, name: str, case: Case) -> None:
        super().__init__(auto_prefix=False)
        self.runs = 0
        self.norm = Parameter(Tensor(np.ones(WIDTH, np.float32)), name=f"{name}.norm")
        self.router: Optional[Parameter] = None
        self.mix: Optional[Region] = None
        if case.model == "experts":
            self.router = _drawn(f"{name}.router", WIDTH, EXPERTS)
            self.up = Region(_experts_up, [_drawn(f"{name}.up", EXPERTS, WIDTH, 2 * INNER)])
            self.down = Region(ops.bmm, [_drawn(f"{name}.down", EXPERTS, INNER, WIDTH)])
        else:
            self.up = Region(_up, [_drawn(f"{name}.up", WIDTH, INNER)])
            self.down = Region(ops.matmul, [_drawn(f"{name}.down", INNER, WIDTH)])
        if case.model == "transformer":
            self.mix = Region(
                Attention(f"{name}.attention", ModelShape(width=WIDTH, heads=HEADS, length=LENGTH), "CPU")
            )
        self.excluded = self._exclude(case.exclusion)

    def _exclude(self, exclusion: str) -> list[Region]:
        """Choose what is called in place of each region, and return the regions that a replay skips."""
        self.calls: dict[str, Any] = {"mix": self.mix, "up": self.up, "down": self.down}
        if exclusion == "none":
            return []
        names = ("up", "down") if exclusion == "chain" else ("mix" if self.mix else "down",)
        for name in names:
            keeps_output = not (exclusion == "chain" and name == "up")
            self.calls[name] = checkpoint_exclude_wrapper(self.calls[name], save_output=keeps_output)
        return [getattr(self, name) for name in names]

    def construct(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        self.runs += 1
        normed = OPERATORS.rms_norm(x, self.norm)
        if self.mix:
            normed = normed + self.calls["mix"](normed)
        if self.router is None:
            return x + self.calls["down"](self.calls["up"](normed))
        tokens = normed.reshape(-1, WIDTH)
        outputs = self.calls["down"](self.calls["up"](tokens.expand_dims(0).tile((EXPERTS, 1, 1))))
        return x + (outputs * self._weights(tokens).swapaxes(0, 1).expand_dims(-1)).sum(0).reshape(x.shape)

    def _weights(self, tokens: Tensor) -> Tensor:
        """Each token's weights of its two best experts, 0 for the others: (tokens, experts)."""
        odds = ops.softmax(ops.matmul(tokens, self.router), -1)
        best = ops.topk(odds, 2)[0]
        kept = odds * (odds >= best[:, 1:]).astype(ms.float32)
        return kept / kept.sum(-1, keepdims=True)


class Stage(nn.Cell):
    """The blocks of one stage, checkpointed if the case says so; the last stage returns the loss."""

    def __init__(self, case: Case, index: int, stages: int) -> None:
        super().__init__(auto_prefix=False)
        first = index * BLOCKS_PER_STAGE
        self.blocks = nn.CellList(
            [Block(f"block{first + i}", case) for i in range(BLOCKS_PER_STAGE)], auto_prefix=False
        )
        self.calls = [block if case.recompute == "none" else checkpoint_wrapper(block) for block in self.blocks]
        self.is_last = index == stages - 1

    def construct(self, x: Tensor, target: Optional[Tensor] = None) -> Tensor:
        """Map (batch, length, width) to the same shape, or to the mean square of the distance to `target`."""
        for call in self.calls:
            x = call(x)
        return ops.square(x - target).mean() if self.is_last else x

    def runs(self) -> dict[str, list[int]]:
        """How often each block and each excluded region ran since the counts were last cleared."""
        return {
            "blocks": [block.runs for block in self.blocks],
            "excluded": [region.runs for block in self.blocks for region in block.excluded],
        }

    def clear_runs(self) -> None:
        """Count from 0 again."""
        for block in self.blocks:
            block.runs = 0
            for region in block.excluded:
                region.runs = 0


def data(case: Case) -> tuple[Tensor, Tensor]:
    """Input and target of a step, (micro-batches, length, width) each."""
    generator = np.random.default_rng(case.micro_batches)
    shape = (case.micro_batches, LENGTH, WIDTH)
    x, target = (Tensor(generator.standard_normal(shape).astype(np.float32)) for _ in range(2))
    return x, target
