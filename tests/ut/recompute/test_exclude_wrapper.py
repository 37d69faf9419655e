"""Excluded regions: executions, values, gradients, containers, transparency (rules 1, 2, 5, 6)."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops
from mindspore.graph.api import _no_grad

from hyper_parallel.core.activation_checkpoint import (
    Phase,
    checkpoint,
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    get_recompute_state,
    is_recomputing,
)

Pair = namedtuple("Pair", "left right")


def test_region_runs_once_and_gradients_are_bitwise_the_plain_ones(leaf, value_and_grads, assert_same):
    x, w, v = leaf(4, 6), leaf(6, 6), leaf(6, 3)
    runs = []

    def product(a, b):
        runs.append("region")
        return mint.matmul(a, b)

    def block(a, b, c, multiply):
        runs.append("block")
        return mint.matmul(ops.square(multiply(ops.tanh(a * 2), b)), c).sum()

    plain = value_and_grads(lambda: block(x, w, v, product), (), [x, w, v])
    runs.clear()
    excluded = checkpoint_exclude_wrapper(product)
    found = value_and_grads(lambda: checkpoint(block, x, w, v, excluded), (), [x, w, v])
    assert_same(found, plain)
    assert runs == ["block", "region", "block"]


@pytest.mark.parametrize("keep_inputs", [False, True])
def test_nested_arguments_and_results_keep_their_types(leaf, value_and_grads, assert_same, keep_inputs):
    x, y, z = leaf(3, 4), leaf(3, 4), leaf(3, 4)
    runs, kinds = [], []

    def region(pair, *, scale, more):
        runs.append(1)
        kinds.append((type(pair), type(more), type(more["list"])))
        left = ops.square(pair.left) * more["list"][0]
        return OrderedDict(
            pair=Pair(left, pair.right * scale), rest=[left + 1, (ops.exp(more["list"][0]),)], flag=True, none=None
        )

    def block(a, b, c, inner):
        pair = Pair(ops.tanh(a), ops.tanh(b))
        made = inner(pair, scale=3, more={"list": [ops.sigmoid(c), pair.left]})
        kinds.append((type(made), type(made["pair"]), type(made["rest"]), type(made["rest"][1])))
        assert made["flag"] is True and made["none"] is None
        return (ops.square(made["pair"].left) * made["pair"].right + made["rest"][0] * made["rest"][1][0]).sum()

    wrt = [x, y, z]
    plain = value_and_grads(lambda: block(x, y, z, region), (), wrt)
    runs.clear()
    excluded = checkpoint_exclude_wrapper(region, keep_inputs=keep_inputs)
    assert_same(value_and_grads(lambda: checkpoint(block, x, y, z, excluded), (), wrt), plain)
    assert len(runs) == 1
    assert set(kinds) == {(Pair, dict, list), (OrderedDict, Pair, list, tuple)}


def test_arguments_of_a_block_may_be_nested(leaf, value_and_grads, assert_same):
    x, y = leaf(3, 4), leaf(3, 4)
    region = checkpoint_exclude_wrapper(lambda a, b: ops.square(a) * b)

    def block(pair, *, extra):
        return (region(ops.tanh(pair.left), extra["b"][0]) * ops.sigmoid(pair.right)).sum()

    def run(call):
        return value_and_grads(lambda: call(block, Pair(x, y), extra={"b": [y]}), (), [x, y])

    assert_same(run(checkpoint), run(lambda fn, *args, **kwargs: fn(*args, **kwargs)))


def test_one_tensor_given_twice(leaf, value_and_grads, assert_same, alive):
    x = leaf(5, 7)
    region = checkpoint_exclude_wrapper(lambda a, b, c: a * b * c["again"])

    def block(a):
        h = ops.tanh(a * 2)
        return (region(h, h, {"again": h}) + 1).sum()

    plain = value_and_grads(lambda: block(x), (), [x])
    assert_same(value_and_grads(lambda: checkpoint(block, x), (), [x]), plain)


def test_outputs_that_are_inputs_and_unused_outputs(leaf, value_and_grads, assert_same):
    x, y = leaf(5, 7), leaf(5, 7)
    runs = []

    def region(a, b):
        runs.append(1)
        return a, ops.square(a) * b, ops.exp(b)

    def block(a, b, inner):
        same, made, _ = inner(ops.tanh(a), ops.sigmoid(b))
        return (ops.square(same) * made).sum()

    plain = value_and_grads(lambda: block(x, y, region), (), [x, y])
    runs.clear()
    excluded = checkpoint_exclude_wrapper(region)
    assert_same(value_and_grads(lambda: checkpoint(block, x, y, excluded), (), [x, y]), plain)
    assert len(runs) == 1


def test_frozen_parameters_and_inputs_without_gradient(leaf, value_and_grads, assert_same, rng):
    x = leaf(5, 7)
    frozen = Parameter(Tensor(rng.randn(7, 7).astype(np.float32)), requires_grad=False)
    picks = Tensor([3, 0, 2], mindspore.int32)
    region = checkpoint_exclude_wrapper(lambda a, w, index: ops.gather(mint.matmul(a, w), index, 0))

    def block(a):
        return ops.square(region(ops.tanh(a), frozen, picks * 1)).sum()

    plain = value_and_grads(lambda: block(x), (), [x])
    assert_same(value_and_grads(lambda: checkpoint(block, x), (), [x]), plain)


def test_the_same_wrapper_several_times_in_blocks_replayed_in_another_order(leaf, value_and_grads, assert_same):
    x, y = leaf(5, 5), leaf(5, 5)
    runs = []

    def product(a, b):
        runs.append(1)
        return mint.matmul(a, b)

    excluded = checkpoint_exclude_wrapper(product)

    def block(a, b, multiply):
        return multiply(ops.tanh(multiply(ops.tanh(a), b)), ops.sigmoid(b))

    def program(call, multiply):
        first, second = call(block, x, y, multiply), call(block, y, x, multiply)
        return (ops.square(first) * second + call(block, first, y, multiply)).sum()

    plain = value_and_grads(lambda: program(lambda fn, *args: fn(*args), product), (), [x, y])
    runs.clear()
    assert_same(value_and_grads(lambda: program(checkpoint, excluded), (), [x, y]), plain)
    assert len(runs) == 6


def test_wrappers_are_transparent_outside_a_checkpoint_and_without_gradients(leaf, value_and_grads, assert_same):
    x = leaf(3, 3)
    phases = []

    def region(a):
        phases.append(get_recompute_state().phase)
        return ops.square(a)

    excluded = checkpoint_exclude_wrapper(region)
    assert_same(value_and_grads(lambda: excluded(x).sum(), (), [x]), value_and_grads(lambda: region(x).sum(), (), [x]))
    with _no_grad():
        found = checkpoint(lambda a: excluded(a) + 1, x)
    np.testing.assert_array_equal(found.asnumpy(), (ops.square(x) + 1).asnumpy())
    assert set(phases) == {Phase.OUTSIDE}


def test_a_region_without_gradients_inside_a_block_runs_once(leaf, value_and_grads, assert_same):
    x = leaf(3, 3)
    runs = []

    def region(a):
        runs.append(1)
        return ops.square(a)

    excluded = checkpoint_exclude_wrapper(region)

    def block(a, inner):
        with _no_grad():
            scale = inner(a)
        return (ops.tanh(a) * scale).sum()

    plain = value_and_grads(lambda: block(x, region), (), [x])
    runs.clear()
    assert_same(value_and_grads(lambda: checkpoint(block, x, excluded), (), [x]), plain)
    assert len(runs) == 1


def test_phase_is_told(leaf, value_and_grads):
    x = leaf(3, 3)
    seen = []

    @checkpoint_exclude_wrapper
    def region(a):
        seen.append(("region", get_recompute_state().phase, is_recomputing()))
        return ops.square(a)

    @checkpoint_wrapper
    def my_block(a):
        state = get_recompute_state()
        seen.append((state.block.rsplit(".", 1)[-1], state.phase, is_recomputing()))
        return (region(ops.tanh(a)) * ops.exp(a)).sum()

    value_and_grads(lambda: my_block(x), (), [x])
    assert seen == [
        ("my_block", Phase.FORWARD, False),
        ("region", Phase.EXCLUDED, False),
        ("my_block", Phase.REPLAY, True),
    ]
    assert get_recompute_state().phase is Phase.OUTSIDE and not is_recomputing()


def test_region_inside_a_region_is_part_of_it(leaf, value_and_grads, assert_same):
    x = leaf(3, 3)
    runs = []

    def inner(a):
        runs.append("inner")
        return ops.exp(a)

    wrapped = checkpoint_exclude_wrapper(inner)
    outer = checkpoint_exclude_wrapper(lambda a: ops.square(wrapped(a)) * a)

    def block(a):
        return (outer(ops.tanh(a)) * ops.sigmoid(a)).sum()

    plain = value_and_grads(lambda: block(x), (), [x])
    runs.clear()
    assert_same(value_and_grads(lambda: checkpoint(block, x), (), [x]), plain)
    assert runs == ["inner"]
