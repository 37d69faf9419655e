"""dx and dw of one forward, case by case: bitwise those of the full backward, each operator run where it should."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.memory import live_tensor_count
from pipeline.execution.retention import RecomputeSession
from pipeline.execution.split_backward import SplitBackward
from tests.ut.chunk.programs import (
    CASES,
    WEIGHTS,
    Scale,
    U,
    V,
    W,
    assert_same,
    engine_gradients,
    gradients_for,
    leaf,
    norms,
    off_the_path,
    own_function_of_a_weight,
    parameter,
    parent_and_child,
    recorded,
    tensor,
    used_twice,
    views,
)


@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_split_is_bitwise_the_full_backward(fn: Callable) -> None:
    x = leaf(4, 4)
    outputs, split = recorded(fn, x)
    grads = gradients_for(outputs)
    input_grads, weight_grads = split.full(grads)
    _, split = recorded(fn, x)
    del outputs
    assert_same(split.inputs(grads), input_grads)
    assert_same(split.weights(), weight_grads)


@pytest.mark.parametrize("fn", [used_twice, parent_and_child, norms, views], ids=lambda fn: fn.__name__)
def test_full_backward_is_mindspores_gradient(fn: Callable) -> None:
    x = leaf(4, 4)
    outputs, split = recorded(fn, x)
    grad = gradients_for(outputs)
    input_grads, weight_grads = split.full(grad)
    used = [weight for weight, found in zip(WEIGHTS, weight_grads) if found is not None]
    expected_input, expected = ms.grad(lambda x: (fn(x) * grad).sum(), (0,), used)(x)
    assert_same([*input_grads, *(found for found in weight_grads if found is not None)], [expected_input, *expected])


def test_dropped_gradients_of_outputs_are_no_gradients() -> None:
    x = leaf(4, 4)
    for given in ((None, tensor(4, 4)), (tensor(4, 4), None), (None, None)):
        _, split = recorded(off_the_path, x)
        input_grads, weight_grads = split.full(given)
        _, split = recorded(off_the_path, x)
        assert_same(split.inputs(given), input_grads)
        assert_same(split.weights(), weight_grads)
        assert (input_grads[0] is None) == (given[0] is None)
        assert (weight_grads[2] is None) == (given[1] is None)


def test_no_input_that_needs_a_gradient_makes_dw_the_full_backward() -> None:
    grad = tensor(4, 4)
    x = tensor(4, 4)
    _, split = recorded(parent_and_child, x)
    _, expected = split.full(grad)
    _, split = recorded(parent_and_child, x)
    assert split.inputs(grad) == ()
    assert_same(split.weights(), expected)
    assert expected[0] is not None


def test_frozen_stage_has_no_weight_gradients() -> None:
    x, grad = leaf(4, 4), tensor(4, 4)
    _, split = recorded(used_twice, x, weights=[])
    (expected,), none = split.full(grad)
    assert none == ()
    _, split = recorded(used_twice, x, weights=[])
    assert_same(split.inputs(grad), [expected])
    assert split.weights() == ()


def test_integer_and_none_inputs_pass_through() -> None:
    def fn(index: Tensor, nothing: None, x: Tensor) -> Tensor:
        return mint.matmul(x, W)[index] + ops.gather(V, index, 0)

    index, x, grad = Tensor([2, 0, 0]), leaf(4, 4), tensor(3, 4)
    _, split = recorded(fn, index, None, x)
    input_grads, weight_grads = split.full(grad)
    _, split = recorded(fn, index, None, x)
    assert_same(split.inputs(grad), input_grads)
    assert_same(split.weights(), weight_grads)


def test_own_function_runs_its_backward_once() -> None:
    x, grad = leaf(4, 4), tensor(4, 4)
    _, split = recorded(own_function_of_a_weight, x)
    Scale.runs = 0
    split.inputs(grad)
    split.weights()
    assert Scale.runs == 2


def test_dx_runs_nothing_off_the_input_path_and_dw_nothing_on_it() -> None:
    x = leaf(4, 4)
    outputs, split = recorded(lambda x: ops.tanh(mint.matmul(x, W * 0.5)), x)
    tanh = autograd.node_of(outputs)
    matmul = autograd.next_edges(tanh)[0][0]
    times = autograd.next_edges(matmul)[1][0]
    ran: list[Any] = []
    autograd.after_node(tanh, lambda *_: ran.append("tanh"))
    autograd.after_node(matmul, lambda passed_on, _: ran.append(("matmul", [grad is not None for grad in passed_on])))
    autograd.after_node(times, lambda *_: ran.append("times"))
    split.inputs(tensor(4, 4))
    assert ran == ["tanh", ("matmul", [True, False])]
    ran.clear()
    split.weights()
    assert ran == [("matmul", [False, True]), "times"]


def test_all_weights_come_from_one_engine_run(monkeypatch: pytest.MonkeyPatch) -> None:
    x = leaf(4, 4)
    _, split = recorded(parent_and_child, x)
    split.inputs(tensor(4, 4))
    runs = []
    engine = autograd._engine_run
    monkeypatch.setattr(autograd, "_engine_run", lambda *args, **kwargs: runs.append(args) or engine(*args, **kwargs))
    split.weights()
    assert len(runs) == 1


def test_hook_of_the_user_on_an_intermediate_tensor_counts_once() -> None:
    """dw calls it again, with the gradient that it made in dx; what it answers then does not count."""
    seen: list[np.ndarray] = []

    def fn(x: Tensor) -> Tensor:
        h = mint.matmul(x, W)
        h.register_hook(lambda grad: seen.append(grad.asnumpy()) or grad * 2)
        return mint.matmul(h, V)

    x, grad = leaf(4, 4), tensor(4, 4)
    _, split = recorded(fn, x)
    input_grads, weight_grads = split.full(grad)
    _, split = recorded(fn, x)
    assert_same(split.inputs(grad), input_grads)
    assert_same(split.weights(), weight_grads)
    whole, dx, dw = seen
    np.testing.assert_array_equal(dx, whole)
    np.testing.assert_array_equal(dw, whole * 2)


def test_hook_of_the_user_on_a_weight_counts_once() -> None:
    seen = []
    weight = parameter("hooked", 4, 4)
    weight.register_hook(lambda grad: seen.append(1))
    x = leaf(4, 4)
    _, split = recorded(lambda x: mint.matmul(mint.matmul(x, weight), weight), x, weights=[weight])
    split.inputs(tensor(4, 4))
    assert seen == []
    split.weights()
    assert seen == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "Only a scalar output has a gradient of its own"),
        (tensor(2, 4), r"An output is Float32 \(4, 4\), but the gradient given for it is Float32 \(2, 4\)"),
        (3.0, "the gradient given for it is float"),
    ],
)
def test_wrong_gradient_of_an_output_is_told(given: Any, message: str) -> None:
    _, split = recorded(used_twice, leaf(4, 4))
    with pytest.raises(ValueError, match=message):
        split.inputs(given)


def test_wrong_nest_of_gradients_is_told() -> None:
    _, split = recorded(off_the_path, leaf(4, 4))
    with pytest.raises(
        ValueError, match=r"outputs has the entries \[0, 1\], but the gradients given for it have \[0\]"
    ):
        split.inputs((tensor(4, 4),))
    with pytest.raises(ValueError, match="outputs is a tuple, but the gradient given for it is a Tensor"):
        split.inputs(tensor(4, 4))


def fused(x: Tensor) -> Tensor:
    """Three layers; dw reads the inputs of the three products, and not what the activations saved."""
    h = mint.matmul(ops.silu(mint.matmul(x, W)), V)
    return mint.matmul(ops.silu(h) * ops.tanh(h), U)


@pytest.mark.parametrize("prefired", [True, False])
def test_between_dx_and_dw_only_what_dw_reads_is_kept(prefired: bool) -> None:
    x, sens = leaf(4, 4), tensor(4, 4)
    expected = engine_gradients(fused, x, sens)
    session = RecomputeSession("test")
    with session.collecting(), autograd.recording():
        output = checkpoint(fused, x)
    split = SplitBackward(output, [x], WEIGHTS)
    del output
    if prefired:
        with session.reading(retain=True):
            session.replay()
    with session.reading(retain=False):
        input_grads = split.inputs(sens)
    weights = {weight.data_ptr() for weight in WEIGHTS}
    kept = [one.asnumpy() for one in session.tensors() if one.data_ptr() not in weights]
    h = mint.matmul(ops.silu(mint.matmul(x, W)), V)
    read = [x, ops.silu(mint.matmul(x, W)), ops.silu(h) * ops.tanh(h)]
    assert len(kept) == len(read)
    for one in read:
        assert any(np.array_equal(one.asnumpy(), other) for other in kept)
    with session.reading(retain=False):
        assert_same([*input_grads, *split.weights()], expected)
    assert list(session.tensors()) == []


def test_gradients_that_waited_are_let_go_although_the_graph_lives_on() -> None:
    """A model may keep a tensor with its graph."""
    x, weight = Tensor(np.ones((64, 64), np.float32)), Parameter(Tensor(np.ones((64, 64), np.float32)), name="w")
    x.requires_grad_()
    with autograd.recording():
        hidden = mint.matmul(ops.tanh(x), weight)
        output = ops.tanh(hidden)
    split = SplitBackward(output, [x], [weight])
    before = live_tensor_count()
    split.inputs(ops.ones_like(output))
    split.weights()
    gc.collect()
    assert live_tensor_count() <= before


@pytest.mark.parametrize("failing", [True, False])
def test_a_graph_that_lives_on_has_no_hooks_left(failing: bool) -> None:
    """A hook that notes the first gradient gives it again to any later backward over a graph that the model keeps."""
    error: list[Exception] = []

    def hook(grad: Tensor) -> Tensor:
        if error:
            raise error.pop()
        return grad

    x, kept, grad = leaf(4, 4), [], tensor(4, 4)

    def fn(x: Tensor) -> Tensor:
        h = ops.tanh(x)
        h.register_hook(hook)
        kept.append(mint.matmul(h, W))
        return mint.matmul(kept[0], V)

    _, split = recorded(fn, x)
    if failing:
        error.append(ValueError("planted"))
        with pytest.raises(ValueError, match="planted"):
            split.inputs(grad)
    else:
        split.inputs(grad)
    split.release()
    (first,) = autograd.run_backward(kept, [grad], [W], keep_graph=True)
    (second,) = autograd.run_backward(kept, [grad * 2], [W], keep_graph=True)
    assert_same([second], [first * 2])
