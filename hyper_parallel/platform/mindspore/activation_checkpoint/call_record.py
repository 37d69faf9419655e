"""What one call of an excluded region leaves for the replay."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

from mindspore import Tensor

from hyper_parallel.platform.nest import Nest


class InputLeaf(NamedTuple):
    """One tensor of the call's arguments: what it looked like, and the handle that stands in for it (None: not deferred)."""

    shape: tuple
    dtype: Any
    handle: Optional[weakref.ref]


class OutputLeaf(NamedTuple):
    """One tensor of the call's result: its data, or the position of the input that it is."""

    tensor: Optional[Tensor]
    input_position: Optional[int]
    requires_grad: bool


class CallRecord:
    """One call of an excluded region: its arguments' shape, its cached output and the random state that it left behind."""

    __slots__ = (
        "inputs",
        "keys",
        "nests",
        "output_nest",
        "outputs",
        "random_state",
        "region_name",
        "released",
        "saved",
    )

    def __init__(self, region_name: str, keys: tuple, nests: tuple[Nest, ...], inputs: tuple[InputLeaf, ...]) -> None:
        """Record the arguments.

        Args:
            region_name: What error messages call the region.
            keys: Position or keyword of each argument.
            nests: The nest of each argument.
            inputs: The tensors of all arguments, in order.
        """
        self.region_name = region_name
        self.keys = keys
        self.nests = nests
        self.inputs = inputs
        self.output_nest: Optional[Nest] = None
        self.outputs: Optional[tuple[OutputLeaf, ...]] = None
        self.random_state: Any = None
        self.saved = True
        self.released = False

    def release(self) -> None:
        """Drop the cached output."""
        self.released = True
        if self.outputs is not None:
            self.outputs = tuple(leaf._replace(tensor=None) for leaf in self.outputs)
