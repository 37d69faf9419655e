"""What a process needs from its surroundings: the right MindSpore, a device target, and what msrun told it.

Nothing here imports MindSpore at module level, so that a missing or wrong MindSpore is told in one sentence.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
from typing import NamedTuple, Optional

__all__ = [
    "DEVICE_TARGETS",
    "PRIVATE_INTERFACES",
    "SUPPORTED_RELEASE",
    "UnsupportedMindSporeError",
    "WorkerEnvironment",
    "check_device",
    "check_mindspore_version",
    "device_target",
    "end_with_parent",
    "peak_memory_mib",
    "prepare_process",
    "threads_per_worker",
    "worker_environment",
]

PRIVATE_INTERFACES: tuple[str, ...] = ()

SUPPORTED_RELEASE = "2.10"
_PR_SET_PDEATHSIG = 1

DEVICE_TARGETS = ("CPU", "Ascend")


class UnsupportedMindSporeError(ImportError):
    """MindSpore is missing, or is a release whose recompute sessions and autograd graph this project does not know."""


class WorkerEnvironment(NamedTuple):
    """What msrun tells a worker: its rank, the number of workers, and whether this process is msrun's scheduler."""

    rank: int
    ranks: int
    is_scheduler: bool


def check_mindspore_version() -> str:
    """Return MindSpore's version.

    Raises:
        UnsupportedMindSporeError: MindSpore cannot be imported, or is not a 2.10 release.
    """
    try:
        import mindspore
    except ModuleNotFoundError as error:
        if error.name != "mindspore":
            raise
        raise UnsupportedMindSporeError(
            f"MindSpore {SUPPORTED_RELEASE} is needed, but no MindSpore is installed in this Python: "
            f"pip install 'mindspore=={SUPPORTED_RELEASE}.*'"
        ) from error
    version = str(getattr(mindspore, "__version__", "unknown"))
    if version != SUPPORTED_RELEASE and not version.startswith(SUPPORTED_RELEASE + "."):
        raise UnsupportedMindSporeError(
            f"MindSpore {SUPPORTED_RELEASE}.x is needed, but this Python has MindSpore {version}: "
            f"pip install 'mindspore=={SUPPORTED_RELEASE}.*'"
        )
    return version


def device_target() -> str:
    """Return ``CPU`` or ``Ascend``, as the environment variable ``DEVICE_TARGET`` says (CPU when it is not set).

    Raises:
        ValueError: another name is given.
    """
    wanted = os.environ.get("DEVICE_TARGET", "CPU")
    for target in DEVICE_TARGETS:
        if wanted.lower() == target.lower():
            return target
    raise ValueError(f"DEVICE_TARGET must be CPU or Ascend, but is {wanted!r}: unset it or name one of the two")


def check_device(target: str) -> str:
    """Return how many devices of a target there are, in words.

    Raises:
        RuntimeError: there is none. The Ascend branch has not yet been run.
    """
    if target == "CPU":
        return "the host itself"
    from mindspore.device_context import ascend

    if not ascend.is_available():
        raise RuntimeError(
            "DEVICE_TARGET is Ascend, but MindSpore finds no NPU on this machine: install the NPU's driver, CANN and "
            "MindSpore for Ascend (GLOG_v=2 shows MindSpore's own reason), or unset DEVICE_TARGET to use the CPU"
        )
    return f"{ascend.device_count()} NPU"


def prepare_process(target: Optional[str] = None) -> str:
    """Set this process to PyNative mode on a device target, before its first operator, and return the target.

    On CPU operators are launched on the calling thread: handing each one through MindSpore's waiting threads costs ten
    to thirty times as much there. The workers of a machine share its cores: more threads than that only wait for each
    other, and where a worker has one thread, MindSpore's idle threads sleep at once (for this an operator is run).
    Python's collector no longer looks at what lives by now: a look at the 160,000 objects that come with MindSpore
    stops this rank, and all that wait for it, for 60 ms and more in the middle of some step.
    On Ascend the asynchronous launch stays: it is what keeps the device busy.
    The Ascend branch is written from MindSpore's documentation and has not yet been run.
    """
    import mindspore

    target = target or device_target()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device(target)
    if target == "CPU":
        from hyper_parallel.platform.mindspore.thread_pool import rest_when_idle

        threads = _threads()
        mindspore.set_context(runtime_num_threads=threads)
        mindspore.runtime.launch_blocking()
        if threads == 1 and not worker_environment().is_scheduler:
            rest_when_idle()
    gc.collect()
    gc.freeze()
    return target


def _threads() -> int:
    """The launcher's ``OMP_NUM_THREADS``, a worker's share of its machine's cores; without it, that share."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) else threads_per_worker(worker_environment().ranks)


def threads_per_worker(workers: int) -> int:
    """Return how many threads each of some workers on this machine should compute with: its share of the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // workers)


def end_with_parent() -> None:
    """Let the kernel end this process when the process that started it is gone, so that no worker is left behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def peak_memory_mib(target: str) -> float:
    """Return the peak so far, in MiB: of the process's resident memory on CPU, of device memory on Ascend."""
    if target == "CPU":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    import mindspore

    return mindspore.runtime.max_memory_allocated() / 2**20


def worker_environment() -> WorkerEnvironment:
    """Return what msrun told this process in ``RANK_ID``, ``MS_WORKER_NUM`` and ``MS_ROLE``; one rank outside msrun.

    Raises:
        ValueError: msrun's variables are not numbers, or the rank is not among the workers.
    """
    role = os.environ.get("MS_ROLE", "")
    rank, ranks = os.environ.get("RANK_ID", "0"), os.environ.get("MS_WORKER_NUM", "1")
    if not rank.isdigit() or not ranks.isdigit() or int(rank) >= int(ranks):
        raise ValueError(
            f"msrun should give RANK_ID below MS_WORKER_NUM, but they are {rank!r} and {ranks!r}: "
            "start the workers with msrun, and on several machines give it --node_rank"
        )
    return WorkerEnvironment(int(rank), int(ranks), role == "MS_SCHED")
