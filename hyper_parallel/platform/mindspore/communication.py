"""Communication between the workers of one msrun job: mccl on CPU, hccl on Ascend.

The only file that touches MindSpore's communication. Three things differ between the devices and stay here:

1. The world group's name. MindSpore fixes the default group at import as hccl's, so every call here names its group,
   and the rank cache of the default group, which `isend` consults, is filled by hand.
2. What "do not block" means. On Ascend `isend` returns a handle. On CPU mccl takes a message whether the receiver has
   asked for it or not, so a send returns when the bytes are handed over and no order of sends can deadlock. A thread
   for sending would not help: MindSpore's executor is one per process, so operators on two threads disturb each other,
   and a receive that waits on one thread keeps a send on another from starting.
3. What "posted ahead" means. On Ascend a receive is started before it is needed. On CPU mccl keeps messages in the
   receiving process, so a message is already there when a late receive asks for it.

Tags are ignored by MindSpore: messages between two ranks arrive in the order in which they were sent.
The Ascend path is written from documentation and not yet run.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import Any, Optional, Union

import mindspore as ms
from mindspore import Tensor, mint
from mindspore.communication import create_group as ms_create_group
from mindspore.communication import get_group_size, get_rank
from mindspore.communication import init as ms_init
from mindspore.ops import communication as ops

PRIVATE_INTERFACES: tuple[str, ...] = ("mindspore.ops.function.comm_func._GROPU_RANK_CACHE",)

WORLD_GROUPS = {"CPU": "mccl_world_group", "Ascend": "hccl_world_group"}
BACKENDS = {"CPU": "mccl", "Ascend": "hccl"}


class World:
    """This worker's place among the workers of the job.

    Attributes:
        rank: this worker's number, 0 to size - 1.
        size: how many workers the job has.
        group: the name of the group of all workers.
        device_target: "CPU" or "Ascend".
    """

    def __init__(self, rank: int, size: int, group: str, device_target: str) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.device_target = device_target

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device_target={self.device_target!r})"


def init(device_target: Optional[str] = None) -> World:
    """Join the job that msrun started. May be called again; only the first call does the work.

    Args:
        device_target: "CPU" or "Ascend"; by default the one that MindSpore's context has.

    Raises:
        RuntimeError: the process was not started by msrun, or the device is not known.
    """
    target = device_target or ms.get_context("device_target")
    if target not in BACKENDS:
        raise RuntimeError(
            f"Expected device target CPU or Ascend, got {target!r}; "
            "set it with mindspore.set_context(device_target=...)."
        )
    if not os.environ.get("MS_ROLE") and target == "CPU":
        raise RuntimeError(
            "This process was not started by msrun, so it has no other workers to talk to; start the script with "
            "msrun --worker_num=N --local_worker_num=N --join=True SCRIPT."
        )
    from mindspore.communication import GlobalComm
    from mindspore.ops.function import comm_func

    if not GlobalComm.INITED:
        ms_init(BACKENDS[target])
    comm_func._GROPU_RANK_CACHE["hccl_world_group"] = get_rank()
    return World(get_rank(), get_group_size(), WORLD_GROUPS[target], target)


def alone(device_target: str = "CPU") -> World:
    """The world of a process that msrun did not start: one rank."""
    return World(0, 1, WORLD_GROUPS[device_target], device_target)


def create_group(world: World, name: str, ranks: Sequence[int]) -> str:
    """Make a group of some ranks and return its name. Every member must call this with the same arguments."""
    full = f"{name}_{'_'.join(str(rank) for rank in ranks)}"
    ms_create_group(full, list(ranks))
    return full


def barrier(world: World, group: Optional[str] = None) -> None:
    """Wait until every rank of the group is here."""
    if world.size > 1:
        ops.barrier(group=group or world.group)


def all_reduce(world: World, tensor: Tensor, group: Optional[str] = None) -> Tensor:
    """Sum a tensor over the ranks of a group. Returns a new tensor; the argument keeps its value."""
    total = tensor.copy()
    if world.size > 1:
        ops.all_reduce(total, group=group or world.group)
    return total


def broadcast(world: World, tensor: Tensor, source: int, group: Optional[str] = None) -> Tensor:
    """Give every rank of the group the tensor of `source` (a world rank). Returns a new tensor."""
    copy = tensor.copy()
    if world.size > 1:
        ops.broadcast(copy, source, group=group or world.group)
    return copy


def send(world: World, tensor: Tensor, destination: int) -> None:
    """Send a tensor to a rank; returns when its memory may be used again."""
    ops.send(tensor, destination, group=world.group)


def receive(world: World, shape: Sequence[int], dtype: Any, source: int) -> Tensor:
    """Wait for the next tensor from a rank. Shape and type must be those that were sent."""
    buffer = mint.empty(tuple(shape), dtype=dtype)
    ops.recv(buffer, source, group=world.group)
    return buffer


class LateReceive:
    """CPU: a receive that is asked for when it is needed. mccl keeps the message until then."""

    def __init__(self, world: World, shape: Sequence[int], dtype: Any, source: int) -> None:
        self._arguments = (world, shape, dtype, source)

    def wait(self) -> Tensor:
        """The tensor, as soon as it is here."""
        return receive(*self._arguments)


class DirectMessenger:
    """CPU: a tensor is handed over at once, on the calling thread. The receiver need not have asked for it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def send(self, tensor: Tensor, destination: int) -> None:
        """Hand a tensor over; its memory may be used again afterwards."""
        send(self.world, tensor, destination)

    def post_receive(self, shape: Sequence[int], dtype: Any, source: int) -> LateReceive:
        """Ask for the next tensor of a rank; `wait()` of the result returns it."""
        return LateReceive(self.world, shape, dtype, source)

    def pending(self) -> int:
        """How many tensors are not yet handed over."""
        return 0

    def flush(self) -> None:
        """Wait until everything is handed over, which it is."""

    def close(self) -> None:
        """Wait until everything is handed over, which it is."""


class StartedReceive:
    """Ascend (not yet run): a receive that the device works on from the moment it is made."""

    def __init__(self, world: World, shape: Sequence[int], dtype: Any, source: int) -> None:
        self._buffer = mint.empty(tuple(shape), dtype=dtype)
        self._handle = ops.irecv(self._buffer, source, group=world.group)

    def wait(self) -> Tensor:
        """The tensor; what is launched from now on waits for it."""
        self._handle.wait()
        return self._buffer


class StreamMessenger:
    """Ascend (not yet run): `isend` and `irecv` return handles; a tensor is kept until its send was waited for."""

    KEPT = 64

    def __init__(self, world: World) -> None:
        self.world = world
        self._sent: collections.deque = collections.deque()

    def send(self, tensor: Tensor, destination: int) -> None:
        """Start a send. The tensor must not be changed until it is sent."""
        self._sent.append((ops.isend(tensor, destination, group=self.world.group), tensor))
        while len(self._sent) > self.KEPT:
            self._sent.popleft()[0].wait()

    def post_receive(self, shape: Sequence[int], dtype: Any, source: int) -> StartedReceive:
        """Start to receive the next tensor of a rank; `wait()` of the result returns it."""
        return StartedReceive(self.world, shape, dtype, source)

    def pending(self) -> int:
        """How many sends were not waited for."""
        return len(self._sent)

    def flush(self) -> None:
        """Wait for every send."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def close(self) -> None:
        """Wait for every send."""
        self.flush()


Messenger = Union[DirectMessenger, StreamMessenger]


def messenger(world: World) -> Messenger:
    """What sends and receives on this device without blocking.

    Receives of one source must be waited for in the order in which they were posted.
    """
    return DirectMessenger(world) if world.device_target == "CPU" else StreamMessenger(world)
