"""Phase, invocation and its resources: what a replay needs to know, in pure Python.

1. An invocation is one call of one checkpointed block. It owns the call records of its excluded regions, in call order, and
   knows the invocations of the blocks that were called inside it. Nothing else refers to the records, so they die with it.
2. A frame says what the current thread is doing for which invocation. Frames nest through a ContextVar: two threads, or two
   replays of one block, never see each other's frame, and every replay reads the records from the start.
3. A record's outputs live as long as a session retains the invocation; without one they are released after the first replay.
"""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from enum import Enum
from typing import Any, NamedTuple, Optional


class Phase(str, Enum):
    """What the current thread is doing with respect to activation recompute."""

    OUTSIDE = "outside"
    FORWARD = "forward"
    EXCLUDED = "excluded"
    REPLAY = "replay"


class RecomputeState(NamedTuple):
    """The phase of the current thread, and the name of the checkpointed block that it is in (None outside)."""

    phase: Phase
    block: Optional[str]


class ReplayMismatchError(RuntimeError):
    """A replay did not make the calls that the forward made."""


class SavedOutputError(RuntimeError):
    """The output of a region with `save_output=False` was used by something else than the next excluded region."""


_serials = itertools.count()


class Invocation:
    """One call of one checkpointed block, and what it has to keep for its replays."""

    __slots__ = ("__weakref__", "block", "children", "records", "released", "serial", "sessions")

    def __init__(self, block: str) -> None:
        self.block = block
        self.serial = next(_serials)
        self.records: list = []
        self.children: list = []
        self.sessions: set = set()
        self.released = False

    def retain(self, session_id: Any) -> None:
        """Keep the records until the session is cleared."""
        self.sessions.add(session_id)

    def replayed(self) -> None:
        """Release the records after a replay, unless a session still retains them."""
        if not self.sessions:
            self.release()

    def session_cleared(self, session_id: Any) -> None:
        """Release the records when the last session that retained them is cleared."""
        if session_id in self.sessions:
            self.sessions.discard(session_id)
            self.replayed()

    def release(self) -> None:
        """Drop every cached output. What is left lets a later replay run the regions again."""
        self.released = True
        for record in self.records:
            record.release()


class Frame:
    """One level of what the current thread is doing; in a forward, `handle` is the platform's handle of the block's call."""

    __slots__ = ("handle", "invocation", "phase")

    def __init__(self, phase: Phase, invocation: Optional[Invocation], handle: Any = None) -> None:
        self.phase = phase
        self.invocation = invocation
        self.handle = handle


class ReplayFrame(Frame):
    """A replay of an invocation: which record and which inner block come next."""

    __slots__ = ("bind", "finished", "next_child", "next_record", "started")

    def __init__(self, invocation: Invocation, bind: Any = None) -> None:
        """Start at the first record.

        Args:
            invocation: What is replayed.
            bind: `bind(handle, tensor)` gives a handle its recomputed input; None in a replay of an outer block, which
                only passes through the inner one.
        """
        super().__init__(Phase.REPLAY, invocation)
        self.bind = bind
        self.next_record = 0
        self.next_child = 0
        self.started = False
        self.finished = False

    def take_record(self, region: str) -> Any:
        """Return the record of the next call of an excluded region, which must be one of the region called `region`."""
        records, position = self.invocation.records, self.next_record
        if position >= len(records):
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' called excluded region '{region}' as its call "
                f"{position + 1}, but the forward made {len(records)} such calls; make the block call the same regions "
                "in its replay as in its forward."
            )
        record = records[position]
        if record.region_name != region:
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' called excluded region '{region}' where the forward "
                f"called '{record.region_name}' (call {position + 1}); make the block call its regions in the same order."
            )
        self.next_record = position + 1
        return record

    def take_child(self, block: str) -> Invocation:
        """Return the invocation that the next inner block had in the forward."""
        children, position = self.invocation.children, self.next_child
        if position >= len(children):
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' called the inner block '{block}' as its call "
                f"{position + 1}, but the forward made {len(children)} such calls; make the block call the same inner "
                "blocks in its replay as in its forward."
            )
        self.next_child = position + 1
        return children[position]

    def check_complete(self) -> None:
        """Raise if the replay made fewer calls of excluded regions than the forward."""
        if self.next_record != len(self.invocation.records):
            missing = self.invocation.records[self.next_record].region_name
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' made {self.next_record} calls of excluded regions, but the "
                f"forward made {len(self.invocation.records)}; the next one missing is '{missing}'. Make the block call the "
                "same regions in its replay as in its forward."
            )


current_frame: ContextVar[Optional[Frame]] = ContextVar("hyper_parallel_recompute_frame", default=None)


def get_recompute_state() -> RecomputeState:
    """Return the phase that the current thread is in, and the checkpointed block that it is in."""
    frame = current_frame.get()
    if frame is None:
        return RecomputeState(Phase.OUTSIDE, None)
    return RecomputeState(frame.phase, frame.invocation.block if frame.invocation is not None else None)


def is_recomputing() -> bool:
    """Return whether the current thread is in the replay of a checkpointed block."""
    frame = current_frame.get()
    return frame is not None and frame.phase is Phase.REPLAY
