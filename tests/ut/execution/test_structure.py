"""Values at stage boundaries: taken apart and put together again."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor

from hyper_parallel.platform.mindspore.autograd import requires_grad
from pipeline.execution.structure import Blueprint, TransportError, encode

DTYPES = [ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int32, ms.int64, ms.bool_, ms.int8, ms.uint8, ms.int16]
SENDABLE = {ms.float32, ms.float16, ms.bfloat16, ms.float64, ms.int32, ms.int64}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = np.arange(int(np.prod(shape))).reshape(shape) % 2
    tensor = (
        Tensor(values.astype(np.float32)).astype(dtype) if values.size else ms.mint.empty(tuple(shape), dtype=dtype)
    )
    if dtype in (ms.float32, ms.float16) and draw(st.booleans()):
        tensor.requires_grad_()
    return tensor


numbers = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
values = st.recursive(
    st.one_of(tensors(), numbers, st.none(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert requires_grad(one) == requires_grad(other)
        if one.size:
            assert np.array_equal(one.astype(ms.float32).asnumpy(), other.astype(ms.float32).asnumpy())
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_same(left, right)
    else:
        assert one == other


@settings(deadline=None, max_examples=60)
@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    structure, parts = encode(value)
    blueprint = Blueprint(structure)
    assert [(tuple(part.shape), part.dtype) for part in parts] == blueprint.parts
    assert all(part.dtype in SENDABLE for part in parts)
    received = [Tensor(part.asnumpy()) if part.dtype != ms.bfloat16 else part.copy() for part in parts]
    assert_same(value, blueprint.build(received))


def test_numbers_do_not_change_the_structure() -> None:
    tensor = Tensor(np.ones((2, 2), np.float32))
    assert encode((tensor, 3, 0.5, True))[0] == encode((tensor, 4, 1.5, False))[0]
    assert encode((tensor, 3))[0] != encode((tensor, 3.0))[0]
    assert encode((tensor, "a"))[0] != encode((tensor, "b"))[0]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [object()]}, "got object at value['a'][0]"),
        ({3: None}, "got dict at value"),
        ((2**70,), "at most 64 bits at value[0]"),
        ([Tensor(np.ones(2, np.complex64))], "at value[0], got Complex64"),
    ],
)
def test_what_cannot_be_sent_is_told_with_its_place(value: Any, words: str) -> None:
    with pytest.raises(TransportError) as caught:
        encode(value)
    assert words in str(caught.value)
