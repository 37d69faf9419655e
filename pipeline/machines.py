"""On which machines the workers of a job run: the options that say it, and the checks of them. Needs only Python."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

__all__ = ["Cluster", "MachineError", "add_options", "check_options"]

_LOOPBACK = ("127.0.0.1", "localhost")


class MachineError(ValueError):
    """The options about machines contradict each other; the message says what to change."""


@dataclass(frozen=True)
class Cluster:
    """Where the workers run.

    Attributes:
        ranks: number of workers on all machines.
        local_ranks: number of workers on this machine.
        master_addr: address of the first machine, which also runs msrun's scheduler.
        port: TCP port of the scheduler on the first machine.
        node_rank: number of this machine, 0 for the first.
        start_time_out: seconds within which all workers have to find each other.
    """

    ranks: int
    local_ranks: int
    master_addr: str = _LOOPBACK[0]
    port: int = 0
    node_rank: int = 0
    start_time_out: int = 120

    @property
    def several_machines(self) -> bool:
        """Whether other machines take part."""
        return self.local_ranks != self.ranks

    @property
    def local_rank_numbers(self) -> range:
        """The ranks that run on this machine."""
        first = self.node_rank * self.local_ranks if self.several_machines else 0
        return range(first, first + self.local_ranks)

    @classmethod
    def from_options(cls, options: argparse.Namespace, port: int) -> Cluster:
        """Return what the options of `add_options` and ``options.workers`` describe, with the scheduler on a port."""
        return cls(
            ranks=options.workers * options.nodes,
            local_ranks=options.workers,
            master_addr=options.master_addr,
            port=port,
            node_rank=options.node_rank,
            start_time_out=options.start_time_out,
        )


def add_options(where: argparse._ActionsContainer) -> None:
    """Declare the options about machines."""
    where.add_argument("--nodes", type=int, default=1, help="number of machines; start the same command on each")
    where.add_argument("--node-rank", type=int, default=0, help="number of this machine, 0 for the first")
    where.add_argument("--master-addr", default=_LOOPBACK[0], help="address of machine 0")
    where.add_argument("--port", type=int, default=0, help="TCP port on machine 0; 0 takes a free one")
    where.add_argument("--start-time-out", type=int, default=120, metavar="S", help="seconds for all workers to appear")


def check_options(options: argparse.Namespace) -> None:
    """Find contradictions.

    Raises:
        MachineError: one sentence that says what is wrong and what to change.
    """
    for name in ("workers", "nodes"):
        if getattr(options, name) < 1:
            raise MachineError(f"--{name} is {getattr(options, name)}, but must be at least 1: give --{name} 1 or more")
    if not 0 <= options.node_rank < options.nodes:
        raise MachineError(
            f"--node-rank {options.node_rank} is not one of {options.nodes} machines: "
            f"number them from 0 to {options.nodes - 1}, and give each --nodes {options.nodes}"
        )
    if options.nodes > 1 and options.master_addr in _LOOPBACK:
        raise MachineError(
            "--master-addr must be an address of machine 0 that the others can reach when --nodes is more than 1"
        )
    if options.nodes > 1 and options.port == 0:
        raise MachineError("--port must be given when --nodes is more than 1, the same on every machine")
