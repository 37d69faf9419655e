"""One-process tests: operators run on the calling thread, and the tests that run beside each other share the cores."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def launch_blocking() -> None:
    """Switch MindSpore to launch blocking before the first operator, which is far faster on few cores."""
    import mindspore

    from hyper_parallel.platform.mindspore.thread_pool import rest_when_idle

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    mindspore.runtime.launch_blocking()
    rest_when_idle()
