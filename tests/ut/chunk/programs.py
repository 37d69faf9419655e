"""Programs whose backward is split: functions of one input and of these weights, and the engine's gradients of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.nest import leaves, map_leaves
from pipeline.execution.split_backward import SplitBackward

RNG = np.random.default_rng(7)


def tensor(*shape: int) -> Tensor:
    return Tensor(RNG.standard_normal(shape).astype(np.float32))


def parameter(name: str, *shape: int) -> Parameter:
    return Parameter(tensor(*shape), name=name)


def leaf(*shape: int) -> Tensor:
    x = tensor(*shape)
    x.requires_grad_()
    return x


class Scale(_Function):
    """x * w with a backward of its own that counts its runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Scale.runs += 1
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class Pair(_Function):
    """Two outputs; the first one's gradient may be missing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return first * w + second, first * x + second


class NoWeightGradient(_Function):
    """x * w where w is taken for a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None


W, V, U = parameter("w", 4, 4), parameter("v", 4, 4), parameter("u", 4, 4)
BIAS, GAMMA, BETA = parameter("bias", 4), parameter("gamma", 4), parameter("beta", 4)
FROZEN = Parameter(tensor(4, 4), name="frozen", requires_grad=False)
NORM = nn.LayerNorm((4,))
DENSE = nn.Dense(4, 4)


def used_twice(x: Tensor) -> Tensor:
    return mint.matmul(ops.relu(mint.matmul(x, W)), W)


def parent_and_child(x: Tensor) -> Tensor:
    h = mint.matmul(x, W)
    g = mint.matmul(h, V)
    return g + mint.matmul(g, W)


def off_the_path(x: Tensor) -> tuple[Tensor, Tensor]:
    return mint.matmul(x, W), U**2


def off_the_path_shared(x: Tensor) -> tuple[Tensor, Tensor]:
    square = U**2
    return mint.matmul(x, square), square.sum()


def through_a_common_function(x: Tensor) -> Tensor:
    half = W * 0.5
    return mint.matmul(ops.tanh(mint.matmul(x, half)), half) + mint.matmul(x, W)


def split_unevenly(x: Tensor) -> Tensor:
    first, second = mint.split(mint.matmul(x, W), 2, 1)
    third, _ = mint.split(second * BIAS[:2], 1, 1)
    return third + first.sum()


def split_one_part(x: Tensor) -> Tensor:
    _, second = mint.split(mint.matmul(x, W), 2, 1)
    return second * 2


def views(x: Tensor) -> Tensor:
    h = mint.matmul(x, W).reshape(2, 2, 4).transpose(1, 0, 2)[1:].reshape(-1, 4)
    return mint.matmul(h.swapaxes(0, 1).reshape(-1, 2), V[:2]) + V.reshape(-1)[:4]


def own_function(x: Tensor) -> Tensor:
    return mint.matmul(Scale.apply(mint.matmul(x, W), BIAS.reshape(1, 4).broadcast_to((4, 4))), V)


def own_function_of_a_weight(x: Tensor) -> Tensor:
    return Scale.apply(Scale.apply(x, W), W)


def own_function_two_outputs(x: Tensor) -> Tensor:
    first, second = Pair.apply(x, W)
    return first * 2 + mint.matmul(second, V)


def own_function_one_output_used(x: Tensor) -> Tensor:
    first, _ = Pair.apply(x, W)
    return first * 2


def own_function_without_weight_gradient(x: Tensor) -> Tensor:
    return NoWeightGradient.apply(mint.matmul(x, V), W)


def own_functions_on_weights_of_own_functions(x: Tensor) -> Tensor:
    h = Scale.apply(mint.matmul(x, V), Scale.apply(W, BIAS.reshape(1, 4).broadcast_to((4, 4))))
    return Scale.apply(h, Scale.apply(Scale.apply(W, U), V)) + W


def own_functions_above_own_functions(x: Tensor) -> Tensor:
    """The upper one on the weight leads to no weight but through the lower one."""
    lower = Scale.apply(W, U)
    return Scale.apply(mint.matmul(x, V), Scale.apply(lower, Tensor(np.full((4, 4), 2, np.float32))))


def operator_above_own_function(x: Tensor) -> Tensor:
    """The sum and the concatenation hand over the gradient of what the own function made, which only they hold."""
    h = ops.addn([x, Scale.apply(W, V)])
    return mint.cat((h, Scale.apply(U, V)), 0)[2:6]


def off_the_path_own_function(x: Tensor) -> tuple[Tensor, Tensor]:
    quantized = Scale.apply(W, U)
    return Scale.apply(x, quantized), Scale.apply(quantized, V)


def norms(x: Tensor) -> Tensor:
    return NORM(mint.matmul(NORM(x) * GAMMA + BETA, W))


def dense(x: Tensor) -> Tensor:
    return x + DENSE(ops.gelu(DENSE(x)))


def concatenated(x: Tensor) -> Tensor:
    return mint.matmul(ops.cat([x, W], 0), V) + ops.cat([x, ops.zeros_like(W)], 0)


def selected(x: Tensor) -> Tensor:
    return ops.where(x > 0, x * BIAS, U)


def no_gradient_outputs(x: Tensor) -> tuple[Any, ...]:
    h = mint.matmul(x, W)
    return h, ops.argmax(h, 1), None, 3, ops.stop_gradient(h), {"aux": h * V}


def passed_through(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, mint.matmul(x, W)


def same_output_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    h = mint.matmul(x, W)
    return h, h


def frozen_weight(x: Tensor) -> Tensor:
    return mint.matmul(mint.matmul(x, FROZEN), W)


def no_weight_used(x: Tensor) -> Tensor:
    return ops.tanh(x) * 2


def weights_only(x: Tensor) -> Tensor:
    return mint.matmul(ops.stop_gradient(x), W) * V


CASES: list[Callable] = [
    used_twice,
    parent_and_child,
    off_the_path,
    off_the_path_shared,
    through_a_common_function,
    split_unevenly,
    split_one_part,
    views,
    own_function,
    own_function_of_a_weight,
    own_function_two_outputs,
    own_function_one_output_used,
    own_function_without_weight_gradient,
    own_functions_on_weights_of_own_functions,
    own_functions_above_own_functions,
    operator_above_own_function,
    off_the_path_own_function,
    norms,
    dense,
    concatenated,
    selected,
    no_gradient_outputs,
    passed_through,
    same_output_twice,
    frozen_weight,
    no_weight_used,
    weights_only,
]
WEIGHTS = [W, V, U, BIAS, GAMMA, BETA, FROZEN, *NORM.trainable_params(), *DENSE.trainable_params()]


def recorded(fn: Callable, *inputs: Any, weights: Sequence[Parameter] = WEIGHTS) -> tuple[Any, SplitBackward]:
    with autograd.recording():
        outputs = fn(*inputs)
    needing = [x for x in leaves(inputs) if isinstance(x, Tensor) and autograd.requires_grad(x)]
    return outputs, SplitBackward(outputs, needing, weights)


def gradients_for(outputs: Any) -> Any:
    def one(output: Any) -> Any:
        needed = isinstance(output, Tensor) and autograd.requires_grad(output)
        return tensor(*output.shape) if needed else None

    return map_leaves(one, outputs)


def assert_same(seen: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [grad is None for grad in seen] == [grad is None for grad in expected]
    for one, other in zip(seen, expected):
        if one is not None:
            np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def engine_gradients(fn: Callable, x: Tensor, grads: Any) -> tuple[Tensor | None, ...]:
    """The gradients of x and of `WEIGHTS` by one run of MindSpore's engine from all outputs, nothing else involved."""
    with autograd.recording():
        outputs = fn(x)
    pairs = [(output, grad) for output, grad in zip(leaves(outputs), leaves(grads)) if grad is not None]
    trained = [weight for weight in WEIGHTS if weight is not FROZEN]
    made = autograd.run_backward(*map(list, zip(*pairs)), [x, *trained], keep_graph=False)
    found = dict(zip(map(id, trained), made[1:]))
    return (made[0], *(found.get(id(weight)) for weight in WEIGHTS))
