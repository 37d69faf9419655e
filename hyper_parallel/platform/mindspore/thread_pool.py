"""What the CPU threads that MindSpore computes with beside the calling one do when they are idle.

Its actor threads look for work 300,000 times before they sleep: for a tenth of a second after an operator their core is
busy. Where the core is free this makes operators of some size faster (256x256 numbers added: 36 us against 53 us; 4x4:
no difference). Workers that share cores take them from one another by it, so there the threads should sleep at once.
MindSpore has a function for this, which Python cannot reach: it is called by its name in the library, and `doctor`
tells if that name is missing.

On Ascend kernels run on the device, and nothing here is called.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import mindspore
import numpy as np
from mindspore import Tensor

PRIVATE_INTERFACES: tuple[str, ...] = (
    "libmindspore_core.so:_ZN9mindspore8ActorMgr8actorMgrE",
    "libmindspore_core.so:_ZTVN9mindspore15ActorThreadPoolE",
    "libmindspore_core.so:_ZN9mindspore10ThreadPool20SetSpinCountMinValueEv",
)

_LIBRARY = Path(mindspore.__file__).parent / "lib" / "libmindspore_core.so"
_ACTOR_MANAGER, _POOL_CLASS, _SPIN_LEAST = (name.split(":")[1] for name in PRIVATE_INTERFACES)
_WORD = 8
_MANAGER_WORDS = 28
"""The size of MindSpore's actor manager on x86-64; the pool is among its first words."""
_BEFORE_FUNCTIONS = 2 * _WORD
"""A C++ object begins with the address of its class's table, past this much at the table's start."""


def rest_when_idle() -> bool:
    """Let the actor threads of the pool sleep as soon as they have no work; its kernel threads look 3,000 times.

    Runs an operator, as MindSpore makes the pool for the first one.

    Returns:
        Whether it could be done. If not, nothing is changed.
    """
    (Tensor(np.zeros(1, np.float32)) + 1.0).asnumpy()
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        spin_least, pools = library[_SPIN_LEAST], _pools(library)
    except (OSError, AttributeError, ValueError):
        return False
    for pool in pools:
        spin_least(ctypes.c_void_p(pool))
    return bool(pools)


def _pools(library: ctypes.CDLL) -> list[int]:
    """The addresses of the pools that the actor manager has: what it points to and is of the pool's class."""
    manager = _address(library, _ACTOR_MANAGER)
    of_pool = _address(library, _POOL_CLASS) + _BEFORE_FUNCTIONS
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        words = [_word(memory, manager + at * _WORD) for at in range(_MANAGER_WORDS)]
        return sorted({word for word in words if word and _word(memory, word) == of_pool})
    finally:
        os.close(memory)


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name))


def _word(memory: int, address: int) -> int:
    """What stands at an address of this process; 0 where nothing can be read."""
    try:
        return int.from_bytes(os.pread(memory, _WORD, address), "little")
    except (OSError, OverflowError):
        return 0
