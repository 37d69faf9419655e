"""What `prepare_process` does to the process, seen in one of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import gc

from hyper_parallel.platform.mindspore.environment import prepare_process

prepare_process("CPU")
print(len(gc.get_objects()), gc.get_freeze_count())
"""


def test_the_collector_leaves_mindspore_alone() -> None:
    environment = {"PYTHONPATH": str(ROOT), "GLOG_v": "3", "PATH": ""}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    looked_at, frozen = map(int, output)
    assert looked_at < 1000 < 100_000 < frozen
