"""Selection of the platform that runs the recompute."""

from __future__ import annotations

from types import ModuleType


def get_platform() -> ModuleType:
    """Return the platform: a module with `checkpoint` and the functions that open, fire and clear recompute sessions.

    Returns:
        The MindSpore platform, `hyper_parallel.platform.mindspore.platform`. MindSpore is imported by the first call
        only.
    """
    from hyper_parallel.platform.mindspore import platform

    return platform
