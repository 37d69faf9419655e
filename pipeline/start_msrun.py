"""Becomes msrun, after asking the kernel to interrupt it when the launcher is gone: msrun then ends its workers.

The arguments are the launcher's process id, the program to become, and msrun's own arguments. A step of its own,
because code between fork and exec is not safe in a launcher with threads.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask, see that it was not too late, and become msrun."""
    launcher, *sys.argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
    if os.getppid() == int(launcher):
        sys.path.pop(0)  # the folder of this file
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
