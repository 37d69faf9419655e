"""The MindSpore platform: the only code that touches MindSpore's private interfaces, one file per interface."""

from __future__ import annotations

from hyper_parallel.platform.mindspore.environment import check_mindspore_version

check_mindspore_version()
