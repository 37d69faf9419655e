"""A batch cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from mindspore import Tensor

from pipeline.execution.nest import map_leaves

Inputs = tuple[tuple, dict]
"""The positional and the keyword inputs of one micro-batch."""


class MicroBatchError(ValueError):
    """A batch that cannot be cut as asked."""


class BatchDimSpec(NamedTuple):
    """Which dimension of an input is the batch.

    Args:
        batch_dim: the dimension; None gives every micro-batch the whole input.
    """

    batch_dim: Optional[int] = 0

    @staticmethod
    def from_tuple(dims: Sequence[Optional[int]]) -> tuple[BatchDimSpec, ...]:
        """A specification for each positional input."""
        return tuple(BatchDimSpec(dim) for dim in dims)

    @staticmethod
    def from_dict(dims: Mapping[str, Optional[int]]) -> dict[str, BatchDimSpec]:
        """A specification for each named input."""
        return {name: BatchDimSpec(dim) for name, dim in dims.items()}


def split(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    micro_batches: int,
    args_batch_dim: Optional[Sequence[BatchDimSpec]] = None,
    kwargs_batch_dim: Optional[Mapping[str, BatchDimSpec]] = None,
) -> list[Inputs]:
    """Cut every tensor of the inputs into equal parts; numbers, text, None and tensors without dimensions go to all.

    Args:
        args: positional inputs, nests of tensors and other values.
        kwargs: keyword inputs.
        micro_batches: how many parts.
        args_batch_dim: one specification per positional input; by default dimension 0.
        kwargs_batch_dim: specifications of keyword inputs by name; by default dimension 0.

    Raises:
        MicroBatchError: a tensor's batch dimension is missing or is not a multiple of `micro_batches`.
    """
    dims = list(args_batch_dim or ()) + [BatchDimSpec()] * len(args)
    named = kwargs_batch_dim or {}
    cut_args = [
        _split_nest(value, micro_batches, dims[i].batch_dim, f"positional input {i}") for i, value in enumerate(args)
    ]
    cut_kwargs = {
        name: _split_nest(value, micro_batches, named.get(name, BatchDimSpec()).batch_dim, f"input {name!r}")
        for name, value in kwargs.items()
    }
    return [
        (tuple(parts[k] for parts in cut_args), {name: parts[k] for name, parts in cut_kwargs.items()})
        for k in range(micro_batches)
    ]


def _split_nest(value: Any, micro_batches: int, dim: Optional[int], name: str) -> list[Any]:
    def part_of(index: int) -> Any:
        return map_leaves(lambda leaf: _part(leaf, index, micro_batches, dim, name), value)

    return [part_of(index) for index in range(micro_batches)]


def _part(leaf: Any, index: int, micro_batches: int, dim: Optional[int], name: str) -> Any:
    if not isinstance(leaf, Tensor) or dim is None or leaf.ndim == 0:
        return leaf
    if not -leaf.ndim <= dim < leaf.ndim:
        raise MicroBatchError(
            f"Expected {name} to have a dimension {dim} for the batch, got shape {tuple(leaf.shape)}."
        )
    size = leaf.shape[dim]
    if size % micro_batches:
        raise MicroBatchError(
            f"Expected a batch that {micro_batches} micro-batches divide, got {size} along dimension {dim} of {name}; "
            "change the batch size or the number of micro-batches."
        )
    part = size // micro_batches
    return leaf.narrow(dim % leaf.ndim, index * part, part).contiguous()
