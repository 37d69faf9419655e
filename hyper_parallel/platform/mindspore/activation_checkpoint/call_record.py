"""What one call of an excluded region leaves for the replay."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional

from mindspore import Tensor

from hyper_parallel.platform.nest import Nest
from hyper_parallel.platform.recompute_state import CallSite, UnsavedOutputError


class InputLeaf(NamedTuple):
    """One tensor of the call's arguments: what it looked like, and the handle that stands in for it (None: kept)."""

    shape: tuple
    dtype: Any
    handle: Optional[weakref.ref]

    def waiting(self) -> Any:
        """Return the handle if an operator still needs the tensor that the replay makes, else None."""
        return None if self.handle is None else self.handle()


class OutputLeaf(NamedTuple):
    """One tensor of the call's result: its data, or the position of the input that it is."""

    tensor: Optional[Tensor]
    input_position: Optional[int]
    requires_grad: bool


class CallRecord:
    """One call of an excluded region: what its arguments looked like, its output, the random state it left behind."""

    __slots__ = (
        "inputs",
        "keys",
        "nests",
        "output_needed",
        "output_nest",
        "outputs",
        "position",
        "random_state",
        "region",
        "released",
        "saved",
    )

    def __init__(
        self, region: Any, position: int, keys: tuple, nests: tuple[Nest, ...], inputs: tuple[InputLeaf, ...]
    ) -> None:
        """Record the arguments.

        Args:
            region: The region, which has a `name`.
            position: Which of its block's calls of excluded regions this is.
            keys: The keywords of the last arguments.
            nests: The nest of each argument.
            inputs: The tensors of all arguments, in order.
        """
        self.region = region
        self.position = position
        self.keys = keys
        self.nests = nests
        self.inputs = inputs
        self.output_nest: Optional[Nest] = None
        self.outputs: tuple[OutputLeaf, ...] = ()
        self.random_state: Any = None
        self.saved = True
        self.output_needed = False
        self.released = False

    @property
    def region_name(self) -> str:
        """What error messages call the region."""
        return self.region.name

    @property
    def finds_out(self) -> bool:
        """Whether the region finds out by itself whether the output is needed."""
        return self.region.finds_out

    def learn_needed(self) -> None:
        """Let later replays, and later calls of the region, have the output."""
        self.output_needed = True
        self.region.output_needed = True

    def learn_not_needed(self, site: Optional[CallSite]) -> None:
        """Let later calls of the region at this place of the block do without saving the output."""
        if site is not None:
            self.region.learn_not_needed(site, self.position)

    def unsaved_output(self) -> UnsavedOutputError:
        """Return the error for a wrong use of the output, which is not saved."""
        return UnsavedOutputError(self.region_name, self)

    def waits_for_input(self) -> bool:
        """Return whether an operator still needs an input that the replay makes."""
        return any(leaf.waiting() is not None for leaf in self.inputs)

    def release(self) -> None:
        """Drop the cached output."""
        self.released = True
        self.outputs = tuple([leaf._replace(tensor=None) for leaf in self.outputs])


class UnsavedOutput:
    """Stands in, in a replay, for the output of a region that was not saved. Only an excluded region accepts it."""

    __slots__ = ("record",)

    def __init__(self, record: CallRecord) -> None:
        self.record = record

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self.record.unsaved_output()

    __getattr__ = __getitem__ = __iter__ = __len__ = __call__ = __bool__ = __float__ = __int__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __truediv__ = _refuse
    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __and__ = __or__ = __xor__ = __invert__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __array__ = _refuse
