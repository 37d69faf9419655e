"""The input path: found once, what is known of its operators, and how the gradients at its branches wait and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops, saved_tensors_hooks

from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.recompute import recompute_session_ctx
from hyper_parallel.platform.mindspore.retention import SavedTensors, dropped_reads
from pipeline.execution.chunk import Chunk
from pipeline.execution.split_backward import SplitBackward
from tests.ut.chunk.programs import assert_same
from tests.ut.chunk.stacks import Stack, micro_batch, one_region


def ones(*shape: int) -> Tensor:
    tensor = Tensor(np.ones(shape, np.float32))
    tensor.requires_grad_()
    return tensor


# What is known of operators -------------------------------------------------------------------------------------------
def recorded(operator: Callable, *values: Tensor) -> tuple[Any, Any]:
    """What an operator returns, the first of several, and its node."""
    with autograd.recording():
        output = operator(*values)
    output = output[0] if isinstance(output, (tuple, list)) else output
    return output, autograd.node_of(output)


COMPUTE_WHAT_IS_ASKED: list[tuple[str, Callable]] = [
    ("Add", ops.add),
    ("AddExt", mint.add),
    ("BatchMatMul", ops.bmm),
    ("BatchMatMulExt", mint.bmm),
    ("BiasAdd", ops.bias_add),
    ("Dense", ops.dense),
    ("Div", mint.div),
    ("MatMul", ops.MatMul(transpose_b=True)),
    ("MatMulExt", mint.matmul),
    ("MatMulExt", ops.matmul),
    ("Mul", ops.mul),
    ("Sub", ops.sub),
    ("SubExt", mint.sub),
]
SAVE_NOTHING: dict[str, Callable] = {
    "Add": lambda x: ops.add(x, x),
    "AddExt": lambda x: x + x,
    "AddN": lambda x: ops.addn([x, x]),
    "BiasAdd": lambda x: ops.bias_add(x, x[0]),
    "BroadcastToView": lambda x: mint.broadcast_to(x, (2, 4, 6)),
    "Cast": lambda x: x.astype(mindspore.float16),
    "Concat": lambda x: mint.cat([x, x]),
    "Contiguous": lambda x: x.swapaxes(0, 1).contiguous(),
    "Divs": lambda x: x / 2.0,
    "ExpandDimsView": lambda x: mint.unsqueeze(x, 0),
    "Muls": lambda x: x * 2.0,
    "Neg": lambda x: -x,
    "ReduceMean": lambda x: ops.mean(x, -1, True),
    "Reshape": lambda x: x.reshape(6, 4),
    "SplitTensorView": lambda x: mint.split(x, 3, -1),
    "StridedSlice": lambda x: x[1:],
    "Sub": lambda x: ops.sub(x, x),
    "SubExt": lambda x: x - x,
    "SumExt": lambda x: x.sum(),
    "Transpose": lambda x: ops.transpose(x, (1, 0)),
    "TransposeView": lambda x: mint.permute(x, (1, 0)),
}


def test_all_that_is_known_of_operators_is_tested() -> None:
    assert {name for name, _ in COMPUTE_WHAT_IS_ASKED} == autograd._COMPUTE_WHAT_IS_ASKED
    assert set(SAVE_NOTHING) == autograd._SAVE_NOTHING


@pytest.mark.parametrize(("name", "operator"), COMPUTE_WHAT_IS_ASKED)
def test_operators_that_are_known_to_compute_what_is_asked_do(name: str, operator: Callable) -> None:
    first, second = {"BatchMatMul": ((2, 4, 4), (2, 4, 4)), "BiasAdd": ((4, 4), (4,))}.get(
        name.removesuffix("Ext"), ((4, 4), (4, 4))
    )
    values = [ones(*first), ones(*second)]
    output, node = recorded(operator, *values)
    seen: list[list[bool]] = []
    assert node.name() == name
    assert autograd.computes_what_is_asked(node)
    autograd.after_node(node, lambda passed_on, _: seen.append([grad is not None for grad in passed_on[:2]]))
    for value in values:
        autograd.run_backward([output], [ops.ones_like(output)], [value], keep_graph=True)
    assert seen == [[True, False], [False, True]]


@pytest.mark.parametrize("name", SAVE_NOTHING)
def test_operators_that_are_known_to_save_nothing_do_not(name: str) -> None:
    saved: list[tuple[int, ...]] = []
    x = ones(4, 6)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda tensor: tensor):
        _, node = recorded(SAVE_NOTHING[name], x)
    assert node.name() == name
    assert autograd.saves_nothing(node)
    assert saved == []


# Found once -----------------------------------------------------------------------------------------------------------
def test_recompute_finds_the_path_and_dx_does_not_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    below = autograd.nodes_below
    monkeypatch.setattr(autograd, "nodes_below", lambda *args: looked.append(1) or below(*args))
    stack = Stack([one_region] * 2, wrapped=True)
    x, grad = micro_batch(0)
    chunk = Chunk(0, 0, stack.weights)
    chunk.forward(stack, x)
    assert looked == []
    chunk.recompute(last=1)
    chunk.recompute()
    assert looked == [1]
    chunk.backward_input(grad)
    chunk.backward_weight()
    assert looked == [1]


def test_without_an_input_that_needs_a_gradient_the_graph_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    roots: list[Any] = []
    below = autograd.nodes_below
    monkeypatch.setattr(autograd, "nodes_below", lambda found, *args: roots.extend(found) or below(found, *args))
    stack = Stack([one_region] * 2, wrapped=True)
    x, grad = micro_batch(0)
    for needs_grad in (False, True):
        chunk = Chunk(0, 0, stack.weights)
        chunk.forward(stack, autograd.detached(x, needs_grad))
        chunk.recompute()
        assert bool(roots) == needs_grad
        chunk.backward_input(grad)
        chunk.backward_weight()
        assert bool(roots) == needs_grad


FIRST, SECOND = (Parameter(Tensor(np.full((4, 4), value, np.float32)), name=f"w{value}") for value in (0.1, 0.2))


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = ops.tanh(mint.matmul(x, FIRST))
    return mint.matmul(hidden, SECOND), hidden * 2


def gradients(given: Any, *steps: str) -> list[Any]:
    """What the weights have after these steps of a chunk, as arrays."""
    chunk = Chunk(0, 0, [FIRST, SECOND])
    chunk.forward(two_outputs, ones(4, 4))
    for step in steps:
        getattr(chunk, step)(*([given] if step in ("backward", "backward_input") else []))
    found = [autograd.gradient_of(weight) for weight in (FIRST, SECOND)]
    for weight in (FIRST, SECOND):
        autograd.clear_gradient(weight)
    return [None if one is None else one.asnumpy() for one in found]


def test_an_output_that_turns_out_to_have_no_gradient() -> None:
    """The path is found from all outputs, as recompute cannot know which ones will have a gradient."""
    grad = Tensor(np.arange(16, dtype=np.float32).reshape(4, 4))
    for given, reached in (((grad, None), [True, True]), ((None, grad), [True, False])):
        whole = gradients(given, "backward")
        split = gradients(given, "recompute", "backward_input", "backward_weight")
        assert [one is not None for one in split] == [one is not None for one in whole] == reached
        for one, other in zip(split, whole):
            np.testing.assert_array_equal(one, other)


# What waits, and who may run the graph meanwhile ---------------------------------------------------------------------
def linear_chain() -> tuple[SplitBackward, Tensor, Tensor]:
    """Three products and two activations: the split, a gradient for the last product, and the second product."""
    x = ones(4, 4)
    with autograd.recording():
        kept = mint.matmul(ops.tanh(mint.matmul(x, FIRST)), SECOND)
        output = mint.matmul(ops.tanh(kept), FIRST)
    return SplitBackward(output, [x], [FIRST, SECOND]), Tensor(np.arange(16, dtype=np.float32).reshape(4, 4)), kept


def test_a_part_of_the_graph_that_a_model_keeps_is_its_own() -> None:
    """Whoever runs it between dx and dw gets its own gradient, and dw is what it would have been."""
    split, grad, kept = linear_chain()
    alone = autograd.run_backward([kept], [grad], [SECOND], keep_graph=True)
    _, expected = split.full(grad)
    split, _, kept = linear_chain()
    split.inputs(grad)
    assert_same(autograd.run_backward([kept], [grad], [SECOND], keep_graph=True), alone)
    assert_same(split.weights(), expected)


def test_dw_that_failed_may_be_asked_for_again_if_the_graph_is_kept() -> None:
    split, grad, _ = linear_chain()
    _, expected = split.full(grad)
    split, _, _ = linear_chain()
    split.inputs(grad)
    errors = [ValueError("planted")]

    def hook(weight_grad: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return weight_grad

    handle = SECOND.register_hook(hook)
    try:
        with pytest.raises(ValueError, match="planted"):
            split.weights(keep_graph=True)
        assert_same(split.weights(keep_graph=True), expected)
        assert_same(split.weights(), expected)
    finally:
        handle.remove()


@pytest.mark.parametrize("retain", [False, True])
def test_dx_leaves_the_session_as_it_was(retain: bool) -> None:
    split, grad, _ = linear_chain()
    with recompute_session_ctx("a user's", retain_on_unpack=retain):
        split.inputs(grad)
        assert (dropped_reads() is None) == retain
    split.release()


class Hook:
    """A hook that is in `left` until it is removed."""

    def __init__(self, handle: Any, left: list[Hook]) -> None:
        self._handle = handle
        self._left = left
        left.append(self)

    def remove(self) -> None:
        self._left.remove(self)
        self._handle.remove()


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    """The hooks at nodes that have been set and not removed."""
    left: list[Hook] = []
    for name in ("before_node", "after_node"):
        set_hook = getattr(autograd, name)
        monkeypatch.setattr(autograd, name, lambda *args, set_hook=set_hook: Hook(set_hook(*args), left))
    return left


@pytest.mark.parametrize("last", ["weights", "release"])
def test_no_hook_is_left(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    left = watched(monkeypatch)
    split, grad, _ = linear_chain()
    with recompute_session_ctx("drops", retain_on_unpack=False):
        split.inputs(grad)
        assert len(left) == 5  # at the products and at the activations
        getattr(split, last)()
    assert left == []


def test_a_dx_that_failed_leaves_no_gradient_and_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it is let go, nor when dx is asked for again."""
    left = watched(monkeypatch)
    x, errors = ones(4, 4), []

    def fail(grad: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return grad

    with autograd.recording():
        hidden = ops.tanh(x)
        hidden.register_hook(fail)
        output = ops.addn([hidden, FIRST * 2])
    for last in ("release", "inputs"):
        split, grad = SplitBackward(output, [x], [FIRST]), ops.ones_like(output)
        errors.append(ValueError("planted"))
        with pytest.raises(ValueError, match="planted"):
            split.inputs(grad)
        with pytest.raises(RuntimeError, match="no dx has kept anything"):
            split.weights()
        visit = split._visit
        assert visit.passed_on
        assert left
        if last == "inputs":
            split.inputs(grad)
            split.weights()
        split.release()
        assert left == []
        assert not visit.passed_on
        assert not visit.arrived


def test_dw_without_a_dx_is_told() -> None:
    """Before any, after one that failed, and after a dw that was the last."""
    split, grad, _ = linear_chain()
    message = "no dx has kept anything for it: ask for dx first, and for a dw that is not the last one with keep_graph"
    with pytest.raises(RuntimeError, match=message):
        split.weights()
    with pytest.raises(ValueError, match="the gradient given for it"):
        split.inputs(3.0)
    with pytest.raises(RuntimeError, match=message):
        split.weights()
    split.inputs(grad)
    split.weights()
    with pytest.raises(RuntimeError, match=message):
        split.weights()


def test_after_dx_the_operators_between_are_gone() -> None:
    """Three activations saved a tensor each, the product two; one of these holds the activation that made it."""
    x, saved = ones(4, 4), SavedTensors()
    with autograd.recording(), saved.counting():
        output = mint.matmul(ops.tanh(ops.tanh(ops.tanh(x))), FIRST)
    split, grad = SplitBackward(output, [x], [FIRST]), ops.ones_like(output)
    del output
    split.explore()
    assert len(list(saved)) == 5
    split.inputs(grad)
    assert len(list(saved)) == 3
    split.weights()
    assert list(saved) == []
