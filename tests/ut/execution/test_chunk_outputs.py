"""What the executor relies on in a chunk's outputs."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint

from hyper_parallel.platform.mindspore.autograd import requires_grad
from pipeline.execution.chunk import Chunk


def test_outputs_say_whether_they_want_a_gradient() -> None:
    weight = Parameter(Tensor(np.ones((3, 3), np.float32)), name="weight")

    def forward(x: Tensor) -> tuple:
        return mint.matmul(x, weight), x * 2, x.astype(ms.int32)

    made, plain, index = Chunk(0, 0, [weight]).forward(forward, Tensor(np.ones((2, 3)), ms.float32))
    assert requires_grad(made)
    assert not requires_grad(plain)
    assert not requires_grad(index)
