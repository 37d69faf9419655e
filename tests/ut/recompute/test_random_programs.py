"""Random programs give, wrapped, bitwise what they give plainly, and leave nothing behind."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from scripts.fuzzing.check import check, forget_what_exists
from scripts.fuzzing.programs import random_program


@pytest.fixture(scope="module", autouse=True)
def quick_counting() -> Iterator[None]:
    """Count Tensor objects among those made from here on only."""
    forget_what_exists()
    yield
    gc.unfreeze()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_wrapped_equals_plain(draw: random.Random) -> None:
    program = random_program(draw)
    note(f"from scripts.fuzzing.programs import *; program = {program}")
    check(program)
