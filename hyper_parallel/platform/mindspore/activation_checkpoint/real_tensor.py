"""Which tensors can carry a mark.

1. An operator that gets a view (a reshape, a slice, one piece of a split), or a tensor that a custom function returned
   unchanged, may work on a copy of it. That copy is what it saves, and the copy has no mark.
2. Nothing on a tensor tells whether this will happen, but what made the tensor does. So it is found out once for each
   kind of maker, by running one operator that saves the tensor.
3. A leaf has no maker. For it the same is found out once for each place where it is used.
4. One that cannot, and needs a gradient, is known by its place in the graph: what an operator saves instead was made
   from it. A real copy at the region's entry could be marked too, but all gradients of the region would be added up at
   the copy, before those of other uses: another order of additions, and other last bits.
5. Without a gradient there is no such place, and no such order: then it is a copy that gets the mark. Each operator
   that reads the view would have made that copy anyway.
"""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import Tensor, ops, saved_tensors_hooks

from hyper_parallel.platform.mindspore.autograd import Function

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.Tensor._get_user_data",
    "mindspore.Tensor._grad_node",
    "mindspore.Tensor._is_leaf",
    "mindspore.Tensor._output_index",
    "mindspore.Tensor._requires_grad",
    "mindspore.Tensor._set_user_data",
    "mindspore._c_expression.BackwardNodePy.name",
)

_PROBE = "hyper_parallel_probe"
_PROBED_TYPES = (mindspore.float16, mindspore.float32, mindspore.float64)


class MarkMemory:
    """What has been found out about who makes tensors that lose their mark."""

    def __init__(self) -> None:
        self._keeps: dict[Any, bool] = {}

    def keeps_mark(self, tensor: Tensor, place: Any) -> bool:
        """Return whether an operator that saves `tensor` will show its mark.

        Args:
            tensor: An input of an excluded region.
            place: What stands for the maker of a leaf: any hashable that names the region's argument.
        """
        kind = place if tensor._is_leaf else _maker(tensor)
        keeps = self._keeps.get(kind)
        if keeps is None:
            keeps = self._keeps[kind] = _probe(tensor)
        return keeps


def _maker(tensor: Tensor) -> Any:
    node = tensor._grad_node
    return (type(node) if isinstance(node, Function) else node.name(), tensor._output_index)


def _probe(tensor: Tensor) -> bool:
    """Save `tensor` once, as an operator does, and look for the mark on what is saved."""
    if not tensor.is_floating_point():
        return tensor.is_contiguous() and tensor.storage_offset() == 0
    if tensor.dtype not in _PROBED_TYPES:
        return False
    found = []
    factor = Tensor(1.0, tensor.dtype)
    factor.requires_grad_()
    tensor._set_user_data(_PROBE, True)
    try:
        with saved_tensors_hooks(lambda saved: found.append(saved._get_user_data(_PROBE)), lambda saved: saved):
            ops.mul(tensor, factor)
    finally:
        tensor._set_user_data(_PROBE, None)
    return any(found)
