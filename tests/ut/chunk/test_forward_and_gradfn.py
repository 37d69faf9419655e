"""`forward_and_gradfn`: whole and split, bitwise the engine's gradients; its arguments, order and errors."""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.nest import leaves
from pipeline.execution.split_backward import forward_and_gradfn
from tests.ut.chunk.programs import (
    CASES,
    WEIGHTS,
    V,
    W,
    assert_same,
    engine_gradients,
    gradients_for,
    leaf,
    off_the_path,
    parameter,
    tensor,
    used_twice,
)


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_forward_and_gradfn_is_bitwise_the_engine_whole_and_split(fn: Callable) -> None:
    x = leaf(4, 4)
    with autograd.recording():
        grads = gradients_for(fn(x))
    expected = engine_gradients(fn, x, grads)
    result, grad_fn = forward_and_gradfn(fn, x, weights=WEIGHTS, grad_position=0)
    assert [type(one) for one in leaves(result)] == [type(one) for one in leaves(fn(x))]
    input_grad, weight_grads = grad_fn(grads)
    assert_same([input_grad, *weight_grads], expected)
    _, grad_fn = forward_and_gradfn(fn, x, weights=WEIGHTS)
    assert_same(grad_fn.compute_input_grad(grads), expected[:1])
    for keep_graph in (True, False):
        assert_same(grad_fn.compute_weight_grad(keep_graph), expected[1:])


def test_forward_and_gradfn_whole_and_split_agree() -> None:
    net = nn.SequentialCell(nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4))
    x, sens = tensor(3, 4), tensor(3, 4)
    expected_input, expected = ms.grad(lambda x: (net(x) * sens).sum(), (0,), list(net.trainable_params()))(x)

    outputs, grad_fn = forward_and_gradfn(net, x)
    np.testing.assert_array_equal(outputs.asnumpy(), net(x).asnumpy())
    (input_grad,), weight_grads = grad_fn(sens)
    assert_same([input_grad, *weight_grads], [expected_input, *expected])

    _, grad_fn = forward_and_gradfn(net, x, grad_position=0)
    assert_same([grad_fn.compute_input_grad(sens)], [expected_input])
    assert_same(grad_fn.compute_weight_grad(keep_graph=True), expected)
    assert_same(grad_fn.compute_weight_grad(), expected)
    total = [grad * 3 for grad in expected]
    for weight, grad in zip(net.trainable_params(), total):
        np.testing.assert_allclose(autograd.gradient_of(weight).asnumpy(), grad.asnumpy(), rtol=1e-6)
    with pytest.raises(RuntimeError, match="compute_weight_grad was asked for, but nothing more comes next"):
        grad_fn.compute_weight_grad()


def test_forward_and_gradfn_with_aux_and_positions() -> None:
    def fn(pair: tuple[Tensor, Tensor], x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        h = mint.matmul(pair[1], W) * x
        return h.sum() * factor, h

    index, y, x = Tensor([1]), tensor(4, 4), tensor(4, 4)
    (value, aux), grad_fn = forward_and_gradfn(fn, (index, y), x, weights=[W], has_aux=True, factor=2.0)
    assert value.shape == () and autograd.node_of(aux) is None
    (none, y_grad), x_grad = grad_fn.compute_input_grad()
    (weight_grad,) = grad_fn.compute_weight_grad()
    assert none is None
    expected = ms.grad(lambda y, x: fn((index, y), x, 2.0)[0], (0, 1), [W])(y, x)
    assert_same([y_grad, x_grad, weight_grad], [*expected[0], *expected[1]])
    with pytest.raises(ValueError, match="grad_position is 2, but there are 2 inputs"):
        forward_and_gradfn(fn, (index, y), x, grad_position=2)


def test_forward_and_gradfn_with_nothing_to_differentiate() -> None:
    index, sens = Tensor([[1, 0], [3, 3]]), tensor(2, 2, 4)
    # A first stage: only integers come in, so dw is the full backward.
    _, grad_fn = forward_and_gradfn(lambda index, none: W[index], index, None, weights=[W])
    assert grad_fn.compute_input_grad(sens) == (None, None)
    (weight_grad,) = grad_fn.compute_weight_grad()
    _, expected = forward_and_gradfn(lambda index: W[index], index, weights=[W])[1](sens)
    assert_same([weight_grad], expected)
    # A frozen stage: no weights.
    x, sens = tensor(4, 4), tensor(4, 4)
    result, grad_fn = forward_and_gradfn(used_twice, x)
    np.testing.assert_array_equal(result.asnumpy(), used_twice(x).asnumpy())
    (input_grad,) = grad_fn.compute_input_grad(sens)
    assert grad_fn.compute_weight_grad() == ()
    assert_same([input_grad], engine_gradients(used_twice, leaf_of(x), sens)[:1])
    # Neither: nothing is recorded, and nothing is asked for.
    _, grad_fn = forward_and_gradfn(lambda index: index + 1, index)
    assert grad_fn() == ((None,), ())


def leaf_of(x: Tensor) -> Tensor:
    return autograd.detached(x, needs_grad=True)


def test_forward_and_gradfn_with_dropped_outputs() -> None:
    x = leaf(4, 4)
    for sens in ((None, tensor(4, 4)), (tensor(4, 4), None)):
        expected = engine_gradients(off_the_path, x, sens)
        _, grad_fn = forward_and_gradfn(off_the_path, x, weights=WEIGHTS)
        assert_same([*grad_fn.compute_input_grad(sens), *grad_fn.compute_weight_grad()], expected)


def test_a_weight_given_twice_gets_its_gradient_once() -> None:
    weight, x, sens = parameter("twice", 4, 4), tensor(4, 4), tensor(4, 4)
    _, grad_fn = forward_and_gradfn(lambda x: mint.matmul(x, weight), x, weights=iter([weight, weight]))
    grad_fn.compute_input_grad(sens)
    first, second = grad_fn.compute_weight_grad()
    assert_same([first, second], [autograd.gradient_of(weight)] * 2)


def test_forward_and_gradfn_after_an_error_has_nothing_more_to_give() -> None:
    _, grad_fn = forward_and_gradfn(used_twice, tensor(4, 4), weights=[W])
    with pytest.raises(ValueError, match=r"the gradient given for it is Float32 \(2, 4\)"):
        grad_fn.compute_input_grad(tensor(2, 4))
    with pytest.raises(RuntimeError, match="compute_weight_grad was asked for, but nothing more comes next"):
        grad_fn.compute_weight_grad()


def test_forward_and_gradfn_with_aux_but_one_output() -> None:
    with pytest.raises(
        ValueError, match="has_aux says that fn returns an output and more, in a tuple, but it returned a"
    ):
        forward_and_gradfn(used_twice, tensor(4, 4), has_aux=True)


def test_gradfn_shares_one_replay_and_keeps_nothing() -> None:
    runs = []

    def block(x: Tensor) -> Tensor:
        runs.append(1)
        return mint.matmul(ops.tanh(mint.matmul(x, W)), V)

    x, sens = leaf(4, 4), tensor(4, 4)
    expected = engine_gradients(block, x, sens)
    runs.clear()
    _, grad_fn = forward_and_gradfn(lambda x: checkpoint(block, x), x, weights=WEIGHTS)
    assert_same(grad_fn.compute_input_grad(sens), expected[:1])
    assert_same(grad_fn.compute_weight_grad(keep_graph=True), expected[1:])
    assert_same(grad_fn.compute_weight_grad(), expected[1:])
    assert len(runs) == 2
    assert list(grad_fn._session.tensors()) == []
