"""Phase, invocation and its resources: what a replay needs to know, in pure Python.

1. An invocation is one call of one checkpointed block. It owns the call records of its excluded regions, in call order,
   and knows the invocations of the blocks called inside it. Nothing else refers to the records, so they die with it.
2. A frame says what the current thread is doing for which invocation. Frames nest through a ContextVar: two threads, or
   two replays of one block, never see each other's frame, and every replay reads the records from the start.
3. Cached outputs live as long as a session retains the invocation. Without one they are released after the first
   replay.
4. A replay is satisfied, and may stop, when it has made the last tensor that an operator still waits for: the last
   placeholder of the block's own operators, and the last input that an excluded region defers.
5. A region that finds out by itself whether its output is needed learns "not needed" only for one place of one block,
   and only where that is certain: the block is not inside another one, and its replay did without the output although
   it made everything that any replay of it can be asked for. In any doubt the output is saved.
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


class UnsavedOutputError(RuntimeError):
    """An output that its region does not save was used by something else than the next excluded region."""

    def __init__(self, region: str, record: Any = None) -> None:
        self.record = record
        super().__init__(
            f"The output of excluded region '{region}' is not saved (save_output=False), so it must go whole, as "
            "one argument, into another excluded region of the same block, but it was used in another way; use "
            "save_output=True."
        )


class StartOver(Exception):
    """A replay has to be done again, as it has to run more than it did. Never reaches the user."""


class CallSite(NamedTuple):
    """What two calls have in common that need the same outputs: the block, and which of its inputs need gradients."""

    owner: Any
    kind: tuple


_serials = itertools.count()


class Invocation:
    """One call of one checkpointed block, and what it has to keep for its replays."""

    __slots__ = ("__weakref__", "block", "children", "records", "released", "serial", "sessions", "site")

    def __init__(self, block: str, site: Optional[CallSite] = None) -> None:
        """Begin.

        Args:
            block: What error messages call the block.
            site: Where the call is made, if what one call finds out holds for the next one; else None.
        """
        self.block = block
        self.site = site
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

    def last_waiting_record(self) -> int:
        """Return the position of the last record whose region still needs an input, -1 if there is none."""
        for position in range(len(self.records) - 1, -1, -1):
            if self.records[position].waits_for_input():
                return position
        return -1


class Frame:
    """One level of what the current thread is doing; in a forward, `handle` is the platform's handle of the call."""

    __slots__ = ("handle", "invocation", "phase")

    def __init__(self, phase: Phase, invocation: Optional[Invocation], handle: Any = None) -> None:
        self.phase = phase
        self.invocation = invocation
        self.handle = handle


class ReplayFrame(Frame):
    """A replay of an invocation: which record and which inner block come next, and whether it may stop."""

    __slots__ = (
        "ended",
        "key",
        "last_record",
        "made",
        "needed",
        "next_child",
        "next_record",
        "pending",
        "plain_outputs",
        "stand_ins",
        "started",
        "stopper",
    )

    def __init__(
        self,
        invocation: Invocation,
        key: Any = None,
        handle: Any = None,
        needed: int = 0,
        outer: Optional[ReplayFrame] = None,
    ) -> None:
        """Start at the first record.

        Args:
            invocation: What is replayed.
            key: What the recomputed tensors are kept under.
            handle: Binds recomputed inputs: `handle.bind(input_handle, tensor, key)`. None in a replay of an outer
                block, which only passes through the inner one.
            needed: How many saved tensors the replay has to make before it may stop.
            outer: The replay of an outer block that this is a part of: what is wrong with a stand-in shows there.
        """
        super().__init__(Phase.REPLAY, invocation, handle)
        self.key = key
        self.needed = needed
        self.made = 0
        self.last_record = invocation.last_waiting_record() if handle is not None else -1
        self.next_record = 0
        self.next_child = 0
        self.started = False
        self.ended = False
        self.stopper: Any = None
        self.stand_ins: list = [] if outer is None else outer.stand_ins
        self.pending: list = [] if outer is None else outer.pending
        self.plain_outputs: list = [] if outer is None else outer.plain_outputs

    def satisfied(self) -> bool:
        """Return whether everything that an operator still waits for has been made (rule 4)."""
        return self.made >= self.needed and self.satisfied_but_for_tensors()

    def satisfied_but_for_tensors(self) -> bool:
        """Return whether nothing is waited for but tensors that the block's own operators save."""
        return (
            self.handle is not None
            and self.next_record > self.last_record
            and (not self.pending or all(stand_in.record.finds_out for stand_in in self.pending))
        )

    def hand_out(self, stand_in: Any) -> Any:
        """Return `stand_in` for an output that is not saved; a replay does not stop before the next region took it."""
        self.stand_ins.append(stand_in)
        self.pending.append(stand_in)
        return stand_in

    def take_back(self, stand_in: Any) -> None:
        """Note that an excluded region accepted `stand_in`."""
        self.pending[:] = [other for other in self.pending if other is not stand_in]

    def learn_not_needed(self, saved: int) -> None:
        """Tell regions that find out by themselves that no replay needs their outputs, if this one can tell.

        A replay that makes everything the forward saved goes as far as any other one of this block.

        Args:
            saved: How many tensors the forward saved.
        """
        if self.made < saved or self.next_record < len(self.invocation.records):
            return
        for stand_in in self.stand_ins:
            if stand_in.record.finds_out:
                stand_in.record.learn_not_needed(self.invocation.site)

    def learn_from(self, error: Exception) -> bool:
        """Tell regions that find out by themselves that their outputs are needed, if the error may come from that.

        Returns:
            Whether there is such a region, so that it is worth to start over.
        """
        if isinstance(error, UnsavedOutputError) and error.record is not None:
            suspects = [error.record]
        else:
            suspects = [stand_in.record for stand_in in self.pending or self.stand_ins]
            if self.misused_stand_in(str(error)) is None:
                # What has been found out before is not put in doubt by an error that may be anybody's.
                suspects = [record for record in suspects if record.saved]
        suspects = [record for record in suspects if record.finds_out]
        for record in suspects:
            record.learn_needed()
        return bool(suspects)

    def misused_stand_in(self, message: str) -> Any:
        """Return the record whose stand-in caused an error with this message, None if none did."""
        suspects = self.pending or self.stand_ins
        return suspects[-1].record if suspects and type(suspects[-1]).__name__ in message else None

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
                f"called '{record.region_name}' (call {position + 1}); make the block call its regions in the same "
                "order."
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

    def check_complete(self, saved: int) -> None:
        """Raise if a replay that ran to its end made fewer calls of excluded regions, or saved other tensors.

        Args:
            saved: How many tensors the forward saved.
        """
        records = self.invocation.records
        if self.next_record != len(records):
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' made {self.next_record} calls of excluded regions, but "
                f"the forward made {len(records)}; the next one missing is '{records[self.next_record].region_name}'. "
                "Make the block call the same regions in its replay as in its forward."
            )
        if self.made != saved:
            raise ReplayMismatchError(
                f"The replay of block '{self.invocation.block}' saved {self.made} tensors, but the forward saved "
                f"{saved}; make the block run the same operators in its replay as in its forward."
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
