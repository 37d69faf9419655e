"""Recomputed-input handles: what stands in for a region's saved input until the replay makes that input again.

1. At a region's entry each tensor that may be deferred is marked, as user data of the tensor, with a handle. At its
   exit every mark is what it was before.
2. The pack hook reads the mark: a marked tensor is saved as its handle, any other as its data. That is all it does,
   unless an input cannot carry a mark (real_tensor.py): then it also asks what an unmarked tensor was made from.
3. A handle's tensor is kept with the recomputed tensors of the block (recompute.py, rule 3). Nothing but the operators
   that saved a handle keeps it alive, so an input that the region does not save costs nothing.
4. Unpack fires the replay if need be, and returns what the replay made; never the tensor of the forward.
"""

from __future__ import annotations

import threading
from typing import Any

from mindspore import Tensor, saved_tensors_hooks

from hyper_parallel.platform.mindspore.autograd import is_custom_function, next_edges, node_id, node_of
from hyper_parallel.platform.mindspore.recompute import BlockHandle, current_recompute_key

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.Tensor._get_user_data",
    "mindspore.Tensor._output_index",
    "mindspore.Tensor._set_user_data",
    "mindspore._c_expression.BackwardNodePy.name",
)


class InputHandle:
    """Stands in for one input of one call of an excluded region, however many operators save it."""

    __slots__ = ("__weakref__", "block", "position", "region")

    def __init__(self, block: BlockHandle, region: str, position: int) -> None:
        self.block = block
        self.region = region
        self.position = position

    def read(self) -> Tensor:
        """Return the recomputed input, which the replay that this may fire has made."""
        key = current_recompute_key()
        made = self.block.recomputed_data
        if self not in made[key]:
            self.block.recompute(key)
        tensor = made[key].get(self)
        if tensor is None:
            raise RuntimeError(
                f"Input {self.position} of excluded region '{self.region}' was read, but no replay of block "
                f"'{self.block.invocation.block}' has made it for this backward pass, or it was dropped already; enter "
                "recompute_session_ctx with retain_on_unpack=True for a backward pass that another one follows."
            )
        return tensor


class Mark:
    """Lets a handle stand in for a tensor, and for its copy if there is one, in what operators save, until it ends.

    The tensor's user data is the mark, not the handle: operators copy user data into what they remember about an input,
    and would keep the handle, and with it the recomputed input, although they do not need it.
    """

    __slots__ = ("before", "copied", "handle", "position", "tensor")

    def __init__(self, tensor: Tensor, before: Any, handle: InputHandle, copied: Tensor | None) -> None:
        """Begin.

        Args:
            tensor: The input of the region.
            before: The mark that it has now.
            handle: Stands in for it.
            copied: What the region works on instead of `tensor`, if `tensor` cannot carry a mark.
        """
        self.tensor = tensor
        self.before = before
        self.handle = handle
        self.position = handle.position
        self.copied = copied
        tensor._set_user_data(_key.name, self)
        if copied is not None:
            copied._set_user_data(_key.name, self)

    def end(self) -> None:
        """Give the tensor the mark that it had before, and let everything go."""
        self.tensor._set_user_data(_key.name, self.before)
        if self.copied is not None:
            self.copied._set_user_data(_key.name, None)
        self.tensor = self.before = self.handle = self.copied = None


class _Key(threading.local):
    """The key of this thread's marks: a tensor that several threads use at once has a mark for each."""

    def __init__(self) -> None:
        self.name = f"hyper_parallel_recomputed_input_{threading.get_ident()}"


_key = _Key()


def mark_of(tensor: Tensor) -> Mark | None:
    """Return the mark that `tensor` has on this thread."""
    return tensor._get_user_data(_key.name)


class Sources:
    """The inputs of a region that lose their mark, known by their place in the graph, until the region's exit."""

    def __init__(self) -> None:
        self._handles: dict[tuple[int, int], InputHandle] = {}

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, tensor: Tensor, handle: InputHandle) -> None:
        """Let `handle` stand in for `tensor`, which has a place in the graph, and for contiguous copies of it."""
        self._handles[node_id(node_of(tensor)), tensor._output_index] = handle

    def pack(self, tensor: Tensor) -> Any:
        """Save what `pack` does; a tensor without a mark as its handle if it is an input or the copy of one."""
        saved = pack(tensor)
        if type(saved) is InputHandle:
            return saved
        node, index = node_of(tensor), tensor._output_index
        if node is not None and not is_custom_function(node) and node.name() == _COPY_OF_A_VIEW:
            node, index = next_edges(node)[0]
        return saved if node is None else self._handles.get((node_id(node), index), saved)

    def end(self) -> None:
        """Let every handle go; the hooks may live as long as what they saved."""
        self._handles.clear()


_COPY_OF_A_VIEW = "Contiguous"


def pack(tensor: Tensor) -> Any:
    """Save a marked tensor as its handle, any other as its data."""
    mark = tensor._get_user_data(_key.name)
    if type(mark) is Mark and mark.handle is not None:
        return mark.handle
    return tensor.data


def unpack(saved: Any) -> Tensor:
    """Return what `pack` saved; the replay's tensor for a handle."""
    return saved.read() if type(saved) is InputHandle else saved


def deferring(sources: Sources) -> saved_tensors_hooks:
    """Return the context in which operators save handles for marked tensors and for `sources`."""
    return saved_tensors_hooks(sources.pack if sources else pack, unpack)
