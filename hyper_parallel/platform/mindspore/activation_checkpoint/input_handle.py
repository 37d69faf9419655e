"""Recomputed-input handles: what stands in for an excluded region's saved input until the replay makes that input again.

1. At a region's entry each tensor that may be deferred is marked, as user data of the tensor, with a handle. At its exit every
   mark is what it was before.
2. The pack hook reads the mark: a marked tensor is saved as its handle, any other as its data. That is all it does.
3. A handle's tensor is kept with the recomputed tensors of the block (recompute.py, rule 3). Nothing but the operators that saved
   a handle keeps it alive, so an input that the region does not save costs nothing.
4. Unpack fires the replay if need be, and returns what the replay made; never the tensor of the forward.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from mindspore import Tensor, saved_tensors_hooks

from hyper_parallel.platform.mindspore.recompute import BlockHandle, current_recompute_key, retains_on_unpack

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.Tensor._get_user_data",
    "mindspore.Tensor._set_user_data",
)


class InputHandle:
    """Stands in for one input of one call of an excluded region, however many operators save it."""

    __slots__ = ("__weakref__", "block", "position", "reads", "region", "saves")

    def __init__(self, block: BlockHandle, region: str, position: int) -> None:
        self.block = block
        self.region = region
        self.position = position
        self.saves = 0
        self.reads: dict = {}

    def read(self) -> Tensor:
        """Return the recomputed input; the last operator to read it in a pass that does not retain lets it go."""
        key = current_recompute_key()
        self.block.recompute(key)
        recomputed = self.block.recomputed_data[key]
        tensor = recomputed.get(self)
        if tensor is None:
            raise RuntimeError(
                f"An input of excluded region '{self.region}' was read, but the replay of block "
                f"'{self.block.invocation.block}' has not made it, or it was read and dropped before; read it once per "
                "backward pass, or enter recompute_session_ctx with retain_on_unpack=True."
            )
        if not retains_on_unpack():
            reads = self.reads[key] = self.reads.get(key, 0) + 1
            if reads >= self.saves:
                del self.reads[key]
                del recomputed[self]
        return tensor


class Mark(NamedTuple):
    """What is needed to end the mark of one tensor, and to find out whether the region changed it."""

    tensor: Tensor
    before: Any
    version: int
    handle: InputHandle


class _MarkKey(threading.local):
    """The key of this thread's marks: a tensor that several threads use at once has a mark for each."""

    def __init__(self) -> None:
        self.name = f"hyper_parallel_recomputed_input_{threading.get_ident()}"


_mark = _MarkKey()


def mark(tensor: Tensor, handle: Any) -> None:
    """Let `handle` stand in for `tensor` in what operators save from now on; None ends it."""
    tensor._set_user_data(_mark.name, handle)


def marked_with(tensor: Tensor) -> Any:
    """Return the handle that stands in for `tensor`, or None."""
    return tensor._get_user_data(_mark.name)


def pack(tensor: Tensor) -> Any:
    """Save a marked tensor as its handle, any other as its data."""
    handle = tensor._get_user_data(_mark.name)
    if type(handle) is InputHandle:
        handle.saves += 1
        return handle
    return tensor.data


def unpack(saved: Any) -> Tensor:
    """Return what `pack` saved; the replay's tensor for a handle."""
    return saved.read() if type(saved) is InputHandle else saved


def deferring() -> saved_tensors_hooks:
    """Return the context in which operators save handles for marked tensors."""
    return saved_tensors_hooks(pack, unpack)
