"""What a chunk retains: its recompute session, and how many bytes it holds.

1. A session belongs to one chunk. All its steps enter it, each on its own thread, so they share one replay per block.
2. When the last replay that a block needs is done, all that served the replay goes: block inputs, cached outputs.
3. Bytes are counted, not guessed: recomputed tensors, block inputs, cached outputs and waiting gradients are looked at
   when asked. Tensors saved outside of checkpointed blocks are looked at in the first micro-batch of each input shape,
   and taken to be as many in the next ones.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore.retention import forget_replayed, kept_tensors

_numbers = itertools.count()


class _Reading:
    """A step is in a session. No generator: that costs several times as much."""

    __slots__ = ("_context", "_session")

    def __init__(self, session: RecomputeSession, context: contextlib.AbstractContextManager) -> None:
        self._session = session
        self._context = context

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, kind: type | None, *_: Any) -> None:
        self._context.__exit__(None, None, None)
        if kind is None:
            self._session.forget_replayed()


class RecomputeSession:
    """One recomputation shared by the steps of a chunk. `id` is unique in the process."""

    def __init__(self, *names: Any) -> None:
        self.id = (*names, next(_numbers))
        self.handles: list[Any] = []
        self._waiting: list[Any] = []
        self._clear = weakref.finalize(self, get_platform().clear_recompute_session, self.id)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Take the handles of all checkpointed blocks called inside."""
        with get_platform().recompute_handle_collector_ctx() as self.handles:
            yield
        self._waiting = self.handles

    def reading(self, retain: bool) -> contextlib.AbstractContextManager[None]:
        """Read recomputed tensors of this session on this thread; `retain`: a later step reads them again.

        Without a block there are none. The session then says that it retains, so that dx takes no care of reads.
        """
        context = get_platform().recompute_session_ctx(self.id, retain_on_unpack=retain or not self.handles)
        return _Reading(self, context)

    def forget_replayed(self) -> None:
        """Let go of what served replays that are done."""
        self._waiting = forget_replayed(self._waiting, self.id)

    def replay(self, last: int | None = None) -> None:
        """Replay all blocks, or the `last` ones, that have not been replayed. Must be called inside `reading`."""
        first = 0 if last is None else max(0, len(self.handles) - last)
        for handle in self.handles[first:]:
            get_platform().recompute_handle(handle, self.id)

    def tensors(self) -> Iterator[Tensor]:
        """What the session keeps alive."""
        return kept_tensors(self.handles, self.id)

    def clear(self) -> None:
        """Let go of everything. May be called again."""
        self.handles = self._waiting = []
        self._clear()


class Retention:
    """What operators outside of checkpointed blocks were seen to save, per shape of a chunk's inputs and per state.

    One for all chunks of a stage.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, dict[Any, int]] = {}

    def knows(self, shapes: Any) -> bool:
        """Whether a chunk with inputs of these shapes has been looked at."""
        return shapes in self._seen

    def learn(self, shapes: Any, state: Any, saved_bytes: int) -> None:
        """Remember what a chunk holds in a state."""
        self._seen.setdefault(shapes, {})[state] = saved_bytes

    def saved_bytes(self, shapes: Any, state: Any) -> int:
        """What a chunk holds in a state; in a state not seen yet, the most that was seen in any."""
        seen = self._seen.get(shapes, {})
        return seen.get(state, max(seen.values(), default=0))
