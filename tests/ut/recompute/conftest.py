"""What the recompute tests share: gradients of a function, by the autograd engine, with the gradient flag restored."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore.autograd import recording, run_backward


def _arrays(tensors: Sequence) -> list:
    return [None if tensor is None else tensor.asnumpy() for tensor in tensors]


def _value_and_grads(fn: Callable, args: Sequence, wrt: Sequence[Tensor], times: int = 1) -> list:
    """Return the arrays of `fn(*args)` (a tensor) and of its gradients, from the last of `times` backward passes."""
    with recording():
        out = fn(*args)
        for again in range(times):
            grads = run_backward([out], [ops.ones_like(out)], wrt, keep_graph=again + 1 < times)
    return _arrays([out, *grads])


def _assert_same(found: Sequence, expected: Sequence) -> None:
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected)):
        assert (one is None) == (other is None), f"result {index}"
        if one is not None:
            np.testing.assert_array_equal(one, other, err_msg=f"result {index}")


@pytest.fixture
def rng() -> np.random.RandomState:
    return np.random.RandomState(7)


@pytest.fixture
def leaf(rng: np.random.RandomState) -> Callable[..., Tensor]:
    """Make tensors that require a gradient."""

    def make(*shape: int) -> Tensor:
        tensor = Tensor(rng.randn(*shape).astype(np.float32))
        tensor.requires_grad_()
        return tensor

    return make


@pytest.fixture
def value_and_grads() -> Callable:
    return _value_and_grads


@pytest.fixture
def assert_same() -> Callable:
    return _assert_same


@pytest.fixture
def alive() -> Callable[..., int]:
    """Count the live tensors of a shape, those that share a storage as one."""

    def count(*shape: int) -> int:
        gc.collect()
        return len({o.data_ptr() for o in gc.get_objects() if type(o) is Tensor and o.shape == shape})

    return count
