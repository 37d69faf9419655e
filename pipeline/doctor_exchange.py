"""Worker of the doctor: rank 0 sends a tensor, rank 1 sends it back doubled, rank 0 checks it."""

from __future__ import annotations

import numpy as np

from hyper_parallel.platform.mindspore.environment import end_with_parent, prepare_process
from pipeline.launch import mark_finished


def main() -> None:
    """Exchange one tensor with the other worker."""
    end_with_parent()
    target = prepare_process()

    import mindspore

    from hyper_parallel.platform.mindspore import communication

    world = communication.init(target)
    values = np.arange(8, dtype=np.float32)
    if world.rank == 0:
        communication.send(world, mindspore.Tensor(values), 1)
        back = communication.receive(world, (8,), mindspore.float32, 1)
        if not np.array_equal(back.asnumpy(), 2 * values):
            raise RuntimeError(f"sent {values}, expected twice of it back, but received {back.asnumpy()}")
    else:
        got = communication.receive(world, (8,), mindspore.float32, 0)
        communication.send(world, got * 2, 0)
    mindspore.runtime.synchronize()
    mark_finished(world.rank)


if __name__ == "__main__":
    main()
