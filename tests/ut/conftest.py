"""One-process tests: operators run on the calling thread, which is far faster on few cores."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def launch_blocking() -> None:
    """Switch MindSpore to launch blocking before the first operator, if this process uses MindSpore at all."""
    import mindspore

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE, device_target="CPU")
    mindspore.runtime.launch_blocking()
