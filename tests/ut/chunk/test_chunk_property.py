"""Any stack, any order of steps: the plain program's gradients, one replay per block, one run per region."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.chunk import Chunk
from pipeline.execution.retention import Retention
from tests.ut.chunk.stacks import KINDS, Arrays, Stack, added, micro_batch, plain_gradients

NO, ALL = "none", "all"


class Order(NamedTuple):
    """How the steps of several micro-batches follow each other."""

    steps: tuple[tuple[int, str], ...]
    """Micro-batch and step, in the order of execution."""
    prefired: tuple[int | str, ...]
    """Per micro-batch: how many of the last blocks recompute replays, `ALL` or `NO`."""


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any order of steps that keeps the order within each micro-batch."""
    prefired, remaining = [], []
    for _ in range(draw(st.integers(1, 3))):
        prefired.append(draw(st.sampled_from((NO, ALL, 1, 2, 3))))
        backward = draw(st.sampled_from((["backward"], ["backward_input", "backward_weight"])))
        remaining.append(["forward", *(["recompute"] if prefired[-1] != NO else []), *backward])
    turns = draw(st.permutations([number for number, steps in enumerate(remaining) for _ in steps]))
    return Order(tuple((number, remaining[number].pop(0)) for number in turns), tuple(prefired))


def run_order(stack: Stack, order: Order, retention: Retention | None) -> tuple[list[np.ndarray], list[int]]:
    """Run all steps; the gradients of the inputs, and the micro-batches in the order of their weights' gradients."""
    count = len(order.prefired)
    chunks = [Chunk(0, number, stack.weights, retention) for number in range(count)]
    data = [micro_batch(number) for number in range(count)]
    input_grads, weights_in_order = {}, []
    for number, step in order.steps:
        x, grad = data[number]
        if step == "forward":
            chunks[number].forward(stack, x)
        elif step == "recompute":
            last = order.prefired[number]
            chunks[number].recompute(None if last == ALL else last)
        elif step == "backward_weight":
            chunks[number].backward_weight()
        else:
            input_grads[number] = getattr(chunks[number], step)(grad)[0].asnumpy()
        if step in ("backward", "backward_weight"):
            weights_in_order.append(number)
    assert [chunk.held_bytes() for chunk in chunks] == [0] * count
    return [input_grads[number] for number in range(count)], weights_in_order


@functools.cache
def plain(kinds: tuple[Callable, ...], number: int) -> tuple[np.ndarray, Arrays]:
    """The gradients of the plain program, which an order does not change."""
    return plain_gradients(Stack(kinds, wrapped=False), number)


def assert_same(seen: Sequence[np.ndarray | None], expected: Sequence[np.ndarray | None]) -> None:
    assert [one is None for one in seen] == [one is None for one in expected]
    for one, other in zip(seen, expected):
        if one is not None:
            np.testing.assert_array_equal(one, other)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6).map(tuple), order=orders(), counted=st.booleans())
def test_any_order_of_steps(kinds: tuple[Callable, ...], order: Order, counted: bool) -> None:
    stack = Stack(kinds, wrapped=True)
    input_grads, weights_in_order = run_order(stack, order, Retention() if counted else None)
    count = len(order.prefired)

    block_runs, region_runs = stack.runs()
    assert block_runs == [2 * count] * len(kinds)
    reference = Stack(kinds, wrapped=False)
    reference(micro_batch(0)[0])
    assert region_runs == [count * runs for runs in reference.runs()[1]]
    assert_same(input_grads, [plain(kinds, number)[0] for number in range(count)])
    expected = added([plain(kinds, number)[1] for number in weights_in_order])
    gradients = [autograd.gradient_of(weight) for weight in stack.weights]
    assert_same([None if one is None else one.asnumpy() for one in gradients], expected)
