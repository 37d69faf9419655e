"""Ends this rank when any rank can no longer go on, with one message that says who, where and why.

1. A thread in every process holds a connection to the monitor on rank 0. A process that dies closes its connection; one
   that is stopped or stuck in native code goes silent; both are noticed by the monitor. A monitor that dies or goes
   silent is noticed by the others.
2. The thread also looks at its own rank: an action that runs for longer than `timeout`, or a wait of twice that, is
   reported. Twice, so that the rank that hangs is named and not the one that waits for it.
3. The first failure wins. Everybody gets it, shows it, and ends; the rank that it is about hears it last, and rank 0
   stays for a moment, so that no connection is torn down with the news in it.
4. A rank whose own action raised ends by that exception, so that the user's code may still clean up, but no later than
   `GRACE` seconds after it. All others end at once, from the thread: their main thread may be blocked in MindSpore.
5. A rank that leaves between two steps ends the others only if they are in a step or begin one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from typing import Any

from pipeline.execution.faults import Failure, PipelineError, Place, Reporter
from pipeline.execution.monitor import GONE, INTERVAL, Line, silence
from pipeline.launch import mark_failed

GRACE = 10.0
ECHO = 3.0
LINGER = 0.5
BEAT = 1.0


class Watch:
    """This rank's side of the watching.

    Args:
        rank: the world rank.
        timeout: longest time of one action, in seconds.
        reporter: describes failures.
    """

    def __init__(self, rank: int, timeout: float, reporter: Reporter) -> None:
        self._rank = rank
        self._timeout = timeout
        self._reporter = reporter
        self._place = Place()
        self._since = time.monotonic()
        self._waiting = False
        self._raising = False
        self._gone: Failure | None = None
        self._decided: Failure | None = None
        self._told = threading.Event()
        self._leaving = False
        self._line: Line | None = None
        self._thread: threading.Thread | None = None

    def connect(self, address: tuple[str, int], hello: dict[str, Any]) -> None:
        """Say hello to the monitor, and wait until all ranks may start.

        Raises:
            PipelineError: not all came, or not all run the same.
        """
        self._line = Line(socket.create_connection(address, timeout=self._timeout))
        self._line.send({"hello": {**hello, "rank": self._rank}})
        self._wait_for_go()
        atexit.register(self._end_at_exit)
        self._thread = threading.Thread(target=self._work, name="pipeline-watch", daemon=True)
        self._thread.start()

    def begin(self, plan: int) -> None:
        """A step of one of the plans starts."""
        self._move(Place(plan, None, True, "at the start of a step"))

    def enter(self, position: int) -> None:
        """An action's turn has come. It may have to wait."""
        self._waiting = True
        self._move(self._place._replace(position=position))

    def pass_by(self, position: int) -> None:
        """A receive's turn has come, which is only asked for.

        The monitor hears of it with the next action or beat; a process that dies here is reported at the place before.
        """
        self._since = time.monotonic()
        self._place = self._place._replace(position=position)

    def waits(self) -> None:
        """The rank waits for others."""
        self._since = time.monotonic()
        self._waiting = True

    def works(self) -> None:
        """The action has what it waited for."""
        self._since = time.monotonic()
        self._waiting = False

    def gather(self) -> None:
        """The rank gathers gradients, which waits for all others."""
        self._waiting = True
        self._move(Place(0, None, True, "gathering the gradients"))

    def leave(self) -> None:
        """The rank is between two steps."""
        self._move(Place(0, None, False, "between two steps"))

    def decide(self, cause: str) -> Failure:
        """Report that this rank raised. Returns the first failure of the job, which may be another rank's."""
        failure = self._reporter.failure(self._rank, self._place, cause)
        self._raising = True
        if self._line is not None:
            self._line.send({"failure": failure.to_json()})
            self._told.wait(ECHO)
        self._decided = self._decided or failure
        self._leave_note(self._decided)
        return self._decided

    def close(self) -> None:
        """Stop watching. The others are told, so that they do not take it for a loss."""
        if self._line is None or self._decided is not None:
            return
        self._leaving = True
        self._line.say_bye()
        if self._thread is not None:
            self._thread.join(self._timeout)
        self._line.close()
        atexit.unregister(self._end_at_exit)

    def _move(self, place: Place) -> None:
        self._place = place
        self._since = time.monotonic()
        if self._line is not None:
            self._line.send({"place": place})
        if self._gone is not None and place.busy:
            self._end(self._gone)

    def _wait_for_go(self) -> None:
        while self._line.open:
            self._line.wait(INTERVAL)
            for message in self._line.read():
                if "failure" in message:
                    raise PipelineError(Failure(**message["failure"]))
                if "go" in message:
                    return
        raise PipelineError(self._reporter.failure(0, Place(), GONE))

    def _work(self) -> None:
        """What the thread does until the schedule is closed, the monitor says bye, or a failure ends the process."""
        heard = beat = time.monotonic()
        rank_0 = Place()
        while True:
            self._line.wait(INTERVAL)
            now = time.monotonic()
            for message in self._line.read():
                heard = now
                if "bye" in message:
                    return self._line.say_bye()
                rank_0 = Place(*message.get("here", rank_0))
                self._hear(message)
            if not self._line.open:
                if self._leaving:
                    return None
                return self._lose(self._reporter.failure(0, rank_0, GONE), rank_0.busy)
            if now - heard > self._timeout:
                self._end(self._reporter.failure(0, rank_0, silence(self._timeout)))
            if now - beat > BEAT and not self._leaving:
                beat = now
                self._line.send({"place": self._place})
            self._look_at_this_rank(now)

    def _hear(self, message: dict[str, Any]) -> None:
        if "failure" in message:
            self._end(Failure(**message["failure"]))
        elif "gone" in message:
            self._lose(Failure(**message["gone"]), False)

    def _lose(self, failure: Failure, was_busy: bool) -> None:
        """A rank is gone. Nobody misses it if no step is under way."""
        self._gone = failure
        if was_busy or self._place.busy:
            self._end(failure)

    def _look_at_this_rank(self, now: float) -> None:
        """Report an action that takes too long; the monitor's answer ends this rank as all others."""
        place, took = self._place, now - self._since
        limit = 2 * self._timeout if self._waiting else self._timeout
        if not place.busy or took <= limit or self._decided:
            return
        what = "has waited for other ranks" if self._waiting else "has been running"
        self._decided = self._reporter.failure(self._rank, place, f"{what} for more than {limit:g} s")
        self._line.send({"failure": self._decided.to_json()})

    def _end(self, failure: Failure) -> None:
        """End this process, at once or, if its own action raised, when it had time to end by that."""
        self._decided = failure
        self._told.set()
        if self._raising:
            time.sleep(GRACE)
        else:
            self._leave_note(failure)
            print(f"Rank {self._rank} ends because of {failure.message}", file=sys.stderr, flush=True)
        if self._rank == 0:
            time.sleep(LINGER)
        _exit_now()

    def _leave_note(self, failure: Failure) -> None:
        with contextlib.suppress(OSError):
            mark_failed(failure.rank, PipelineError(failure), failure.stage, failure.action, teller=self._rank)

    def _end_at_exit(self) -> None:
        """After a failure, leave without MindSpore's own good-bye: it waits for ranks that are gone."""
        if self._decided is not None:
            _exit_now()


def _exit_now() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
