"""The meeting point of all ranks' watches: it runs on rank 0, hears who is gone, and tells everybody.

It speaks lines of JSON over TCP. A watch says hello once, then where its rank is; the monitor answers "go" when all are
there and run the same plan. The first failure that it learns of goes to every rank, those that come after are dropped.
It reads in intervals and not at every line, so that watching does not take the interpreter from the rank's own work.
A side that leaves says bye and goes on reading until the other side has closed: a connection that is closed with unread
lines in it is torn down, and what the other side has not read yet, as the bye, would be lost.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.execution.faults import Failure, Place, Reporter

INTERVAL = 0.2
FAREWELL = 5.0
GONE = "the process is gone (killed, ended, or its connection was lost)"


class Line:
    """One TCP connection that carries lines of JSON and never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._unread = b""
        self._unsent = b""
        self.open = True

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; what the other side does not take yet is sent with the next one."""
        with self._lock:
            self._unsent += json.dumps(message).encode() + b"\n"
            try:
                sent = self._connection.send(self._unsent)
                self._unsent = self._unsent[sent:]
            except BlockingIOError:
                return
            except OSError:
                self.open = False

    def read(self) -> list[dict[str, Any]]:
        """What has come since the last call. Sets `open` to False when the other side is gone."""
        while self.open:
            try:
                part = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._unread += part
            self.open = bool(part)
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, seconds: float) -> None:
        """Wait until there is something to read, but no longer than so."""
        if self.open:
            select.select([self._connection], [], [], seconds)

    def say_bye(self) -> None:
        """Send the last message; the other side closes when it has read it."""
        self.send({"bye": True})
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self.open = False
        with contextlib.suppress(OSError):
            self._connection.close()


class Member:
    """A rank as the monitor sees it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.hello: dict[str, Any] = {}
        self.place = Place()
        self.heard = time.monotonic()
        self.left = False


class Monitor:
    """Watches over all ranks from rank 0.

    Args:
        address: the address of this machine that the other ranks can reach.
        size: how many ranks there are.
        timeout: seconds after which a rank that says nothing is given up.
        compare: looks at all hellos, by rank; returns a failure, or None if the job may start.
        reporter: describes failures.
    """

    def __init__(
        self,
        address: str,
        size: int,
        timeout: float,
        compare: Callable[[dict[int, dict]], Failure | None],
        reporter: Reporter,
    ) -> None:
        self._size = size
        self._timeout = timeout
        self._compare = compare
        self._reporter = reporter
        self._members: dict[int, Member] = {}
        self._unknown: list[Member] = []
        self._failure: Failure | None = None
        self._listener = socket.create_server((address, 0), backlog=size)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pipeline-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. The ranks are told, so that they do not take it for a loss."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        if self._gather():
            while not self._stop.wait(INTERVAL) and not all(member.left for member in self._members.values()):
                self._look_around()
        self._say_bye()
        self._listener.close()

    def _say_bye(self) -> None:
        """Leave when every rank has, or after `FAREWELL` seconds."""
        lines = [member.line for member in self._members.values()]
        for line in lines:
            line.say_bye()
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline and any(line.open for line in lines):
            for line in lines:
                line.read()
            time.sleep(0.01)
        for line in lines:
            line.close()

    def _gather(self) -> bool:
        """Wait until every rank said hello, compare what they run, and let them start."""
        deadline = time.monotonic() + self._timeout
        while len(self._members) < self._size:
            if self._stop.wait(0.02):
                return False
            if time.monotonic() > deadline:
                missing = min(set(range(self._size)) - set(self._members))
                self._tell(self._reporter.failure(missing, Place(), f"did not start within {self._timeout:g} s"))
                return False
            self._let_in()
        problem = self._compare({rank: member.hello for rank, member in self._members.items()})
        if problem:
            self._tell(problem)
            return False
        self._send_all({"go": True})
        return True

    def _let_in(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unknown.append(Member(Line(self._listener.accept()[0])))
        for member in list(self._unknown):
            for message in member.line.read():
                member.hello = message["hello"]
                self._members[member.hello["rank"]] = member
                self._unknown.remove(member)

    def _look_around(self) -> None:
        """Hear every rank. One that is gone explains what others report, so it comes first."""
        reported = [failure for member in self._members.values() for failure in self._hear(member)]
        gone, silent = [], []
        for rank, member in self._members.items():
            if member.left:
                continue
            if not member.line.open:
                member.left = True
                gone.append((member.place.busy, self._reporter.failure(rank, member.place, GONE)))
            elif time.monotonic() - member.heard > self._timeout:
                silent.append(self._reporter.failure(rank, member.place, silence(self._timeout)))
        for failure in [failure for busy, failure in gone if busy] + reported + silent:
            self._tell(failure)
        for _, failure in gone:
            self._send_all({"gone": failure.to_json()})
        self._send_all({"here": self._members[0].place})

    def _hear(self, member: Member) -> list[Failure]:
        failures = []
        for message in [] if member.left else member.line.read():
            member.heard = time.monotonic()
            if "failure" in message:
                failures.append(Failure(**message["failure"]))
            elif "bye" in message:
                member.left = True
                member.line.close()
            else:
                member.place = Place(*message["place"])
        return failures

    def _tell(self, failure: Failure) -> None:
        """Tell every rank the first failure. The rank that it is about, and this process, hear it last and end last."""
        if self._failure is None:
            self._failure = failure
            self._send_all({"failure": failure.to_json()}, about=failure.rank)

    def _send_all(self, message: dict[str, Any], about: int = 0) -> None:
        for _, member in sorted(self._members.items(), key=lambda item: (item[0] == 0, item[0] == about)):
            if member.line.open:
                member.line.send(message)


def silence(timeout: float) -> str:
    """The cause when a process is there but says nothing."""
    return f"the process has not answered for {timeout:g} s (stopped, or stuck in native code)"
