"""Random programs, wrapped, give bitwise what they give plainly, and leave nothing behind (rules 1, 2, 8, 9, 10).

The programs are those of scripts/fuzz_recompute.py, which replays one of them alone by its seed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.fuzzing.check import check_seed, forget_what_exists

PARTS, EXAMPLES = 6, 50


@pytest.fixture(autouse=True)
def only_new_objects_are_counted() -> Iterator[None]:
    """Keep the objects of other tests out of the counts of Tensor objects, which makes these quick."""
    forget_what_exists()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("part", range(PARTS))
def test_a_wrapped_program_gives_what_the_plain_one_gives(part: int) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 2**32 - 1))
    def checks(number: int) -> None:
        check_seed(number * PARTS + part)

    checks()
