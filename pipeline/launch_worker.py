"""What ``python -m pipeline launch`` lets every worker run: the user's script, and a word to the launcher at its end.

The arguments are the script and its own arguments.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

from hyper_parallel.platform.mindspore.environment import end_with_parent, worker_environment
from pipeline.launch import mark_failed, mark_finished


def main() -> None:
    """Run the script as ``python SCRIPT`` would, and tell how it ended. msrun's scheduler runs it without a word."""
    end_with_parent()
    worker = worker_environment()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        _run(sys.argv[0])
    except BaseException as error:
        traceback.print_exc()
        if not worker.is_scheduler:
            mark_failed(worker.rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if not worker.is_scheduler:
        mark_finished(worker.rank)


def _run(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


if __name__ == "__main__":
    main()
