"""A block that changes the output of an excluded region in place."""

from __future__ import annotations

import gc

import pytest
from mindspore import mint, ops

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform.mindspore.memory import live_tensor_count


def _block(change):
    calls = []
    region = checkpoint_exclude_wrapper(lambda x, w: (calls.append(1), mint.matmul(x, w))[1])

    def body(x, w, v):
        hidden = region(x, w)
        change(hidden)
        return mint.matmul(ops.tanh(hidden), v)

    return body, checkpoint_wrapper(body), calls


def _set(hidden):
    hidden[0] = 7.0


def test_elements_are_set(leaf, value_and_grads, assert_same):
    """MindSpore gives the tensor a new storage, so the cached output is as the region left it."""
    args = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    body, call, calls = _block(_set)
    plain = value_and_grads(body, args, args)
    counts = []
    for step in range(5):
        calls.clear()
        assert_same(value_and_grads(call, args, args), plain)
        assert calls == [1], f"step {step}"
        gc.collect()
        counts.append(live_tensor_count())
    assert len(set(counts[1:])) == 1


def test_a_change_of_the_storage_is_told(leaf, value_and_grads):
    args = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    _, call, _ = _block(lambda hidden: hidden.copy_(hidden * 2))
    with pytest.raises(RuntimeError, match=r"changed the output of an excluded region .* copy"):
        value_and_grads(call, args, args)
