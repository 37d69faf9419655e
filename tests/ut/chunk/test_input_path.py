"""The input path: found once, what is known of its operators, and how the gradients at its branches wait and go."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops, saved_tensors_hooks

from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.retention import storage_bytes
from pipeline.execution.chunk import Chunk
from pipeline.execution.split_backward import SplitBackward
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


@pytest.mark.parametrize(
    "operator",
    [
        mint.matmul,
        ops.matmul,
        mint.bmm,
        ops.bmm,
        ops.dense,
        mint.add,
        ops.add,
        mint.sub,
        ops.sub,
        mint.div,
        ops.mul,
        ops.bias_add,
    ],
    ids=lambda operator: operator.__name__,
)
def test_operators_that_are_known_to_compute_what_is_asked_do(operator: Callable) -> None:
    shapes = (
        [(2, 4, 4), (2, 4, 4)] if "bmm" in operator.__name__ else [(4, 4), (4,) if operator is ops.bias_add else (4, 4)]
    )
    values = [ones(*shape) for shape in shapes]
    output, node = recorded(operator, *values)
    seen: list[list[bool]] = []
    assert autograd.computes_what_is_asked(node)
    autograd.after_node(node, lambda passed_on, _: seen.append([grad is not None for grad in passed_on[:2]]))
    for value in values:
        autograd.run_backward([output], [ops.ones_like(output)], [value], keep_graph=True)
    assert seen == [[True, False], [False, True]]


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: ops.add(x, x),
        lambda x: x + x,
        lambda x: ops.addn([x, x]),
        lambda x: ops.bias_add(x, x[0]),
        lambda x: x.astype(mindspore.float16),
        lambda x: mint.cat([x, x]),
        lambda x: x / 2.0,
        lambda x: x * 2.0,
        lambda x: -x,
        lambda x: ops.mean(x, -1, True),
        lambda x: ops.sub(x, x),
        lambda x: x - x,
        lambda x: x.sum(),
        lambda x: mint.broadcast_to(x, (2, 4, 6)),
        lambda x: x.swapaxes(0, 1).contiguous(),
        lambda x: mint.unsqueeze(x, 0),
        lambda x: x.reshape(6, 4),
        lambda x: mint.split(x, 3, -1),
        lambda x: x[1:],
        lambda x: ops.transpose(x, (1, 0)),
        lambda x: mint.permute(x, (1, 0)),
    ],
)
def test_operators_that_are_known_to_save_nothing_do_not(operator: Callable) -> None:
    saved = []
    with saved_tensors_hooks(lambda tensor: saved.append(1) or tensor, lambda tensor: tensor):
        _, node = recorded(operator, ones(4, 6))
    assert autograd.saves_nothing(node), node.name()
    assert saved == []


@pytest.mark.parametrize("operator", [ops.relu, ops.gelu, ops.tanh, lambda x: x * x, lambda x: ops.softmax(x, -1)])
def test_operators_that_save_something_are_not_known_to_save_nothing(operator: Callable) -> None:
    assert not autograd.saves_nothing(recorded(operator, ones(4, 6))[1])


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


# How gradients wait ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep_graph", [False, True])
def test_each_gradient_that_waits_is_let_go_once_dw_has_used_it(keep_graph: bool) -> None:
    x, hidden = ones(4, 4), []
    with autograd.recording():
        for weight in (FIRST, SECOND, FIRST):
            hidden.append(mint.matmul(hidden[-1] if hidden else x, weight))
    split = SplitBackward(hidden[-1], [x], [FIRST, SECOND])
    split.inputs(Tensor(np.ones((4, 4), np.float32)))
    waiting = [weakref.ref(grad) for grad in {id(grad): grad for grad in split.tensors()}.values()]
    everything = storage_bytes(split.tensors())
    alive: list[int] = []
    for output in reversed(hidden):
        autograd.after_node(
            autograd.node_of(output), lambda *_: alive.append(sum(grad() is not None for grad in waiting))
        )
    split.weights(keep_graph)
    # One per shape is there to start with, until the end.
    assert alive == ([3, 3, 3] if keep_graph else [2, 1, 1])
    assert storage_bytes(split.tensors()) == (everything if keep_graph else 0)
