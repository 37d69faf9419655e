"""Batches cut into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

from pipeline.execution.microbatch import BatchDimSpec, MicroBatchError, split


def tensor(*shape: int) -> Tensor:
    return Tensor(np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape))


def test_parts_are_in_order_and_make_up_the_batch() -> None:
    x = tensor(6, 2)
    parts = split((x,), {"y": {"z": [x]}}, 3)
    assert len(parts) == 3
    assert np.array_equal(np.concatenate([args[0].asnumpy() for args, _ in parts]), x.asnumpy())
    assert np.array_equal(np.concatenate([kwargs["y"]["z"][0].asnumpy() for _, kwargs in parts]), x.asnumpy())


def test_other_dimensions_and_values_for_all() -> None:
    x, whole = tensor(2, 4), tensor(3)
    parts = split(
        (x, whole, 7),
        {"mask": x, "scale": Tensor(2.0), "name": "n", "nothing": None},
        2,
        BatchDimSpec.from_tuple((1, None)),
        BatchDimSpec.from_dict({"mask": -1}),
    )
    for index, (args, kwargs) in enumerate(parts):
        columns = slice(2 * index, 2 * index + 2)
        assert np.array_equal(args[0].asnumpy(), x.asnumpy()[:, columns])
        assert np.array_equal(kwargs["mask"].asnumpy(), x.asnumpy()[:, columns])
        assert args[1] is whole and args[2] == 7
        assert (float(kwargs["scale"]), kwargs["name"], kwargs["nothing"]) == (2.0, "n", None)


def test_parts_are_contiguous() -> None:
    assert all(args[0].is_contiguous() for args, _ in split((tensor(2, 4),), {}, 2, BatchDimSpec.from_tuple((1,))))


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(
        MicroBatchError, match="a batch that 4 micro-batches divide, got 6 along dimension 0 of positional"
    ):
        split((tensor(6, 2),), {}, 4)
    with pytest.raises(MicroBatchError, match="got 6 along dimension 0 of input 'y'"):
        split((), {"y": tensor(6, 2)}, 4)


def test_a_batch_dimension_that_is_not_there() -> None:
    with pytest.raises(MicroBatchError, match=r"input 'y' to have a dimension 2 for the batch, got shape \(6, 2\)"):
        split((), {"y": tensor(6, 2)}, 2, None, {"y": BatchDimSpec(2)})
