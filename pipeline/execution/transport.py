"""Messages between stages: sent without blocking, received in the order of the plan.

1. A channel is one stage sending one kind of value (outputs or gradients) to one other stage. Each end remembers the
   structure (nest, shapes, types) of the channel's last value.
2. The first value of a channel in a step is preceded by one message of 16 bytes: "as before", or the length of the new
   structure, which follows. Later values of the step have no such message. So shapes may change from step to step,
   nothing is ever asked back, and receives can be posted before they are needed. A structure that changes within a step
   is an error of the sender.
3. A send does not wait for its receiver, so no order of sends and receives can deadlock.
4. MindSpore ignores tags: messages between two ranks come in the order in which they were sent. The receiver takes that
   order from the sender's row of the plan, not from its own, and keeps what it had to receive early.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore import communication
from pipeline.execution.structure import Blueprint, TransportError, encode

HEADER_SHAPE = (2,)
AS_BEFORE = 0


class Channel(NamedTuple):
    """One stage sending one kind of value to another: kind is "F" for outputs, "B" for gradients."""

    source: int
    destination: int
    kind: str


class Message(NamedTuple):
    """One value of a channel."""

    channel: Channel
    micro_batch: int

    def __str__(self) -> str:
        what = "output" if self.channel.kind == "F" else "gradient"
        return (
            f"the {what} of micro-batch {self.micro_batch} "
            f"from stage {self.channel.source} to stage {self.channel.destination}"
        )


class Incoming:
    """What one rank sends to this one in a step: expected, then posted, then arrived."""

    def __init__(self) -> None:
        self.expected: collections.deque[Message] = collections.deque()
        self.posted: collections.deque[tuple[Message, Blueprint, list]] = collections.deque()
        self.arrived: dict[Message, Any] = {}


class Transport:
    """Sends and receives values for the stages of this rank.

    Args:
        world: this worker's place.
        rank_of: the world rank that holds a stage.
    """

    def __init__(self, world: communication.World, rank_of: Callable[[int], int]) -> None:
        self._rank_of = rank_of
        self._messenger = communication.messenger(world)
        self._incoming: dict[int, Incoming] = collections.defaultdict(Incoming)
        self._sent: dict[Channel, str] = {}
        self._received: dict[Channel, tuple[str, Blueprint]] = {}
        self._announced: set[Channel] = set()

    def begin_step(self, expected: Iterable[Message]) -> None:
        """Start a step.

        Args:
            expected: every message that other ranks send to this one in the step; those of one rank in its sending
                order.
        """
        self._announced.clear()
        for message in expected:
            self._incoming[self._rank_of(message.channel.source)].expected.append(message)

    def send(self, message: Message, value: Any) -> None:
        """Send a value and go on."""
        channel = message.channel
        rank = self._rank_of(channel.destination)
        structure, tensors = encode(value)
        if channel not in self._announced:
            self._announced.add(channel)
            self._announce(rank, _check_number(message), structure, self._sent.get(channel))
            self._sent[channel] = structure
        elif self._sent[channel] != structure:
            raise TransportError(
                f"Expected {message} to look like the first one of the step, {self._sent[channel]}, got {structure}; "
                "shapes and types may change between steps but not between the micro-batches of one: pad them."
            )
        for tensor in tensors:
            self._send(tensor, rank)

    def post(self, message: Message) -> None:
        """Ask for a message before it is needed, where that can be done without waiting."""
        incoming = self._incoming[self._rank_of(message.channel.source)]
        while message in incoming.expected and incoming.expected[0].channel in self._announced:
            self._post_next(incoming)

    def receive(self, message: Message) -> Any:
        """Wait for a message and return its value."""
        incoming = self._incoming[self._rank_of(message.channel.source)]
        while message not in incoming.arrived:
            if incoming.posted:
                posted, blueprint, parts = incoming.posted.popleft()
                incoming.arrived[posted] = blueprint.build([part.wait() for part in parts])
            elif incoming.expected:
                self._read_announcement(incoming.expected[0])
                self._post_next(incoming)
            else:
                raise TransportError(f"{message} is not sent in this step; check the sends of the plan.")
        return incoming.arrived.pop(message)

    def send_value(self, rank: int, value: Any) -> None:
        """Send one value outside of any channel."""
        structure, tensors = encode(value)
        self._announce(rank, 0, structure, None)
        for tensor in tensors:
            self._send(tensor, rank)

    def receive_value(self, rank: int) -> Any:
        """Wait for the value that `send_value` of another rank sent to this one."""
        words, _ = self._receive(HEADER_SHAPE, ms.int64, rank).asnumpy().tolist()
        blueprint = Blueprint(self._receive_structure(rank, words))
        return blueprint.build([self._receive(shape, dtype, rank) for shape, dtype in blueprint.parts])

    def pending(self) -> int:
        """Messages that are not yet handed over, expected, posted or received but not yet used."""
        waiting = sum(len(one.expected) + len(one.posted) + len(one.arrived) for one in self._incoming.values())
        return waiting + self._messenger.pending()

    def flush(self) -> None:
        """Wait until everything sent is handed over."""
        self._messenger.flush()

    def close(self) -> None:
        """Stop, when everything is handed over."""
        self._messenger.close()

    def _send(self, tensor: Tensor, rank: int) -> None:
        self._messenger.send(tensor if tensor.is_contiguous() else tensor.contiguous(), rank)

    def _announce(self, rank: int, check: int, structure: str, before: str | None) -> None:
        """Send what the next value of a channel looks like."""
        words = AS_BEFORE if structure == before else _pack(structure)
        length = AS_BEFORE if structure == before else words.size
        self._messenger.send(Tensor(np.asarray([length, check], np.int64)), rank)
        if length:
            self._messenger.send(Tensor(words), rank)

    def _read_announcement(self, message: Message) -> None:
        channel = message.channel
        if channel in self._announced:
            return
        rank = self._rank_of(channel.source)
        words, check = self._receive(HEADER_SHAPE, ms.int64, rank).asnumpy().tolist()
        if check != _check_number(message):
            raise TransportError(
                f"Expected {message} from rank {rank}, got another message; the ranks do not run the same plan."
            )
        if words != AS_BEFORE:
            structure = self._receive_structure(rank, words)
            self._received[channel] = (structure, Blueprint(structure))
        self._announced.add(channel)

    def _post_next(self, incoming: Incoming) -> None:
        message = incoming.expected.popleft()
        blueprint = self._received[message.channel][1]
        rank = self._rank_of(message.channel.source)
        parts = [self._messenger.post_receive(shape, dtype, rank) for shape, dtype in blueprint.parts]
        incoming.posted.append((message, blueprint, parts))

    def _receive(self, shape: tuple[int, ...], dtype: Any, rank: int) -> Tensor:
        return self._messenger.post_receive(shape, dtype, rank).wait()

    def _receive_structure(self, rank: int, words: int) -> str:
        return self._receive((words,), ms.int32, rank).asnumpy().tobytes().decode().rstrip()


def _pack(structure: str) -> np.ndarray:
    """Text as int32 words, the type of few bytes that every backend can send; blanks fill the last word."""
    raw = structure.encode()
    return np.frombuffer(raw + b" " * (-len(raw) % 4), np.int32).copy()


def _check_number(message: Message) -> int:
    """A number that tells one message from another."""
    return zlib.crc32(repr(message).encode())
