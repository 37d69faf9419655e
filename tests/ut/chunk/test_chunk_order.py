"""Every order of steps gives the gradients of the plain program, with one replay per block."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.chunk import Chunk


class Block(nn.Cell):
    def __init__(self, rng: np.random.Generator, width: int) -> None:
        super().__init__()
        self.up = Parameter(Tensor(rng.standard_normal((width, width)).astype(np.float32)), name="up")
        self.scale = Parameter(Tensor(rng.standard_normal(width).astype(np.float32)), name="scale")
        self.norm = nn.LayerNorm((width,))
        self.runs = 0

    def construct(self, x: Tensor) -> Tensor:
        self.runs += 1
        h = ops.relu(mint.matmul(self.norm(x), self.up)) * self.scale
        return x + h + mint.matmul(h, self.up)


class Stack(nn.Cell):
    def __init__(self, blocks: list[Block], checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.CellList(blocks)
        self.checkpointed = checkpointed

    def construct(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x) if self.checkpointed else block(x)
        return x


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("prefire", [None, 1, 2])
def test_gradients_are_those_of_the_plain_program(checkpointed: bool, split: bool, prefire: int | None) -> None:
    rng = np.random.default_rng(0)
    net = Stack([Block(rng, 6) for _ in range(2)], checkpointed=False)
    weights = list(net.trainable_params())
    x, grad = (Tensor(rng.standard_normal((4, 6)).astype(np.float32)) for _ in range(2))
    plain = ms.grad(lambda x: (net(x) * grad).sum(), (0,), weights)(x)

    net.checkpointed = checkpointed
    x.requires_grad_()
    chunk = Chunk(stage=0, micro_batch=0, weights=weights)
    for block in net.blocks:
        block.runs = 0
    chunk.forward(net, x)
    if prefire is not None:
        chunk.recompute(prefire)
    if split:
        (input_grad,) = chunk.backward_input(grad)
        chunk.backward_weight()
    else:
        (input_grad,) = chunk.backward(grad)

    assert [block.runs for block in net.blocks] == [1 + checkpointed] * 2
    np.testing.assert_array_equal(input_grad.asnumpy(), plain[0].asnumpy())
    for weight, expected in zip(weights, plain[1]):
        np.testing.assert_array_equal(autograd.gradient_of(weight).asnumpy(), expected.asnumpy())
