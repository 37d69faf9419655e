"""Excluded regions: executions, values and gradients (rules 1, 2)."""

from __future__ import annotations

from mindspore import mint, ops

from hyper_parallel.core.activation_checkpoint import checkpoint, checkpoint_exclude_wrapper


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
