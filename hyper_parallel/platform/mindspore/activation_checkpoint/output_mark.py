"""Marks on the outputs of excluded regions, by which the same invocation knows them again.

1. An output of a region is kept by its record (or, with `save_output=False`, by nobody), so a region of the same
   invocation that gets it as an input does not defer it.
2. The mark holds the serial number of the invocation and no object, so it keeps nothing alive.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.nest import flatten
from hyper_parallel.platform.recompute_state import Invocation, UnsavedOutputError

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.Tensor._get_user_data",
    "mindspore.Tensor._set_user_data",
)

_OUTPUT = "hyper_parallel_excluded_output"
_UNSAVED = "hyper_parallel_unsaved_output"


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor (or a parameter)."""
    return isinstance(value, Tensor)


def mark_output(tensor: Tensor, invocation: Invocation) -> None:
    """Mark `tensor` as the output of an excluded region of `invocation`."""
    tensor._set_user_data(_OUTPUT, invocation.serial)


def is_output_of(tensor: Tensor, invocation: Invocation) -> bool:
    """Return whether `tensor` is an output of an excluded region of `invocation`."""
    return tensor._get_user_data(_OUTPUT) == invocation.serial


def mark_unsaved(tensor: Tensor, invocation: Invocation, region: str) -> None:
    """Mark `tensor` as an output that the region does not save."""
    tensor._set_user_data(_UNSAVED, (invocation.serial, region))


def mark_saved(tensor: Tensor) -> None:
    """Forget that a region does not save `tensor`: another one returns it that does, or makes it again if need be."""
    if tensor._get_user_data(_UNSAVED) is not None:
        tensor._set_user_data(_UNSAVED, None)


def check_result_is_saved(invocation: Invocation, result: Any) -> None:
    """Raise if a block returns an output that its region does not save."""
    if all(record.region.save_output is not False for record in invocation.records):
        return
    leaves: list[Tensor] = []
    flatten(result, is_tensor, leaves)
    for leaf in leaves:
        mark = leaf._get_user_data(_UNSAVED)
        if mark is not None and mark[0] == invocation.serial:
            raise UnsavedOutputError(mark[1])
