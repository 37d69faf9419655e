"""dx and dw of one forward, case by case: bitwise those of the full backward, each operator run where it should."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.memory import live_tensor_count
from pipeline.execution.nest import leaves, map_leaves
from pipeline.execution.retention import RecomputeSession
from pipeline.execution.split_backward import SplitBackward, forward_and_gradfn

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


def engine_gradients(fn: Callable, x: Tensor, grads: Any) -> tuple[Tensor | None, ...]:
    """The gradients of x and of `WEIGHTS` by one run of MindSpore's engine from all outputs, nothing else involved."""
    with autograd.recording():
        outputs = fn(x)
    pairs = [(output, grad) for output, grad in zip(leaves(outputs), leaves(grads)) if grad is not None]
    trained = [weight for weight in WEIGHTS if weight is not FROZEN]
    made = autograd.run_backward(*map(list, zip(*pairs)), [x, *trained], keep_graph=False)
    found = dict(zip(map(id, trained), made[1:]))
    return (made[0], *(found.get(id(weight)) for weight in WEIGHTS))


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
