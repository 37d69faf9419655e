"""What `prepare_process` does to the process, seen in one of its own."""

from __future__ import annotations

from collections.abc import Callable

PROGRAM = """
import gc

from hyper_parallel.platform.mindspore.environment import prepare_process

prepare_process("CPU")
print(len(gc.get_objects()), gc.get_freeze_count())
"""


def test_the_collector_leaves_mindspore_alone(words_of: Callable[[str], list[str]]) -> None:
    looked_at, frozen = map(int, words_of(PROGRAM))
    assert looked_at < 1000 < 100_000 < frozen
