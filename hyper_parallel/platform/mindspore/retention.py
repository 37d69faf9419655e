"""What a recompute session and a recorded graph keep alive, seen and let go through MindSpore's recompute handles.

1. A recomputed tensor is kept under the placeholder that the forward saved in its place, so it goes with the operator
   that holds the placeholder. What a later pass reads is what the operators still in the graph have saved.
2. A block's inputs, its function and the cached outputs of its excluded regions serve its replay only. Where there is
   one session, all may go once the block has been replayed for it; no placeholder will ask for them again.
3. A tensor that was saved keeps the operator that made it, with what that one saved. So in dx what is read for the last
   time is dropped when it is read: `DroppedReads` says for which reads that is not so.
4. What operators outside of checkpointed blocks save cannot be seen from Python. `SavedTensors` looks at it through a
   pack hook. The hook costs time at each operator, so it is put around one forward of each kind, not around all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from mindspore import Tensor, saved_tensors_hooks
from mindspore.common.recompute import _recompute_session

PRIVATE_INTERFACES: tuple[str, ...] = (
    "mindspore.common.recompute._recompute_session",
    "mindspore.common.recompute._RecomputeHandle.hybrid_args",
    "mindspore.common.recompute._RecomputeHandle.input_node",
    "mindspore.common.recompute._RecomputeHandle.is_recomputed",
    "mindspore.common.recompute._RecomputeHandle.kwargs",
    "mindspore.common.recompute._RecomputeHandle.recomputed_data",
    "mindspore.common.recompute._RecomputeHandle.recompute_fn",
    "mindspore.common.recompute._RecomputeSession.retain_on_unpack",
)


class DroppedReads:
    """The reads of a session that drops each recomputed tensor as it is read; those of some operators may be kept.

    Holds for the session that the thread was in, until the thread leaves it.
    """

    __slots__ = ("_session",)

    def __init__(self, session: Any) -> None:
        self._session = session

    def keep(self) -> None:
        """What is read from here on is kept for a later pass."""
        self._session.retain_on_unpack = True

    def drop(self, *_: Any) -> None:
        """What is read from here on is dropped again. Also a hook before an operator."""
        self._session.retain_on_unpack = False


def dropped_reads() -> DroppedReads | None:
    """The reads of the session that this thread is in, None if they are kept or there is no session."""
    session = _recompute_session.get()
    return None if session is None or session.retain_on_unpack else DroppedReads(session)


def forget_replayed(handles: Iterable[Any], session_id: Any) -> list[Any]:
    """Let go of what only a replay reads (rule 2), for the blocks that had theirs. No other session may want them.

    Returns:
        the handles of the blocks that had none.
    """
    waiting = []
    for handle in handles:
        if handle.is_recomputed.get(session_id):
            handle.hybrid_args = handle.kwargs = handle.input_node = handle.recompute_fn = None
            handle.invocation.release()
        else:
            waiting.append(handle)
    return waiting


def kept_tensors(handles: Iterable[Any], session_id: Any) -> Iterator[Tensor]:
    """The tensors that the handles keep: inputs and cached outputs that wait for a replay, and what a replay made."""
    for handle in handles:
        yield from handle.recomputed_data.get(session_id, {}).values()
        yield from (value for value in handle.hybrid_args or () if isinstance(value, Tensor))
        for record in handle.invocation.records:
            yield from (leaf.tensor for leaf in record.outputs or () if leaf.tensor is not None)


class _Saved:
    """What an operator saved. Lives as long as the operator keeps it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """The tensors that operators saved under the eyes of this object, as far as the operators are alive."""

    def __init__(self) -> None:
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def __iter__(self) -> Iterator[Tensor]:
        return iter([saved.tensor for saved in self._saved])

    def counting(self) -> saved_tensors_hooks:
        """The context in which this object sees what operators save."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.data)
        self._saved.add(saved)
        return saved


def storage_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Bytes of the tensors; what lies at one address counts once, or not at all if one of `without` lies there."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        address = tensor.data_ptr()
        sizes[address] = max(sizes.get(address, 0), tensor.nbytes)
    for tensor in without:
        sizes.pop(tensor.data_ptr(), None)
    return sum(sizes.values())
