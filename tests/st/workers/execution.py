"""All cases that need four healthy ranks, in one job: starting one takes longer than running them."""

from __future__ import annotations

import sys
import time

from hyper_parallel.platform.mindspore import communication
from hyper_parallel.platform.mindspore.environment import prepare_process
from pipeline.launch import mark_finished
from tests.st import harness


def main(wanted: list[str]) -> None:
    """Run the parts that are named, or all."""
    from tests.st.workers import boundaries, schedules

    prepare_process("CPU")
    world = communication.init()
    results: dict = {}
    for part in (schedules, boundaries):
        name = part.__name__.rsplit(".", 1)[1]
        if not wanted or name in wanted:
            started = time.monotonic()
            results[name] = part.run_all(world)
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
            harness.write_result(world.rank, results)
    mark_finished(world.rank)


if __name__ == "__main__":
    if harness.is_scheduler():
        prepare_process("CPU")
        communication.init()
    else:
        main(sys.argv[1:])
