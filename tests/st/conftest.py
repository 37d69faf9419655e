"""Jobs that several tests look at are started once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.st import harness


@pytest.fixture(scope="session")
def execution(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the four ranks of `workers/execution.py` found."""
    return harness.run_ok("execution.py", 4, tmp_path_factory.mktemp("execution"), timeout=240.0)
