"""The chunk's states: what each step allows, keeps, lets go of, and leaves behind when it fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, ops
from mindspore.common.recompute import _recompute_session, _recompute_session_handles

from hyper_parallel.core.activation_checkpoint import checkpoint, checkpoint_exclude_wrapper, is_recomputing
from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.memory import live_tensor_count
from pipeline.execution.chunk import Chunk, ChunkError, ChunkState
from pipeline.execution.retention import RecomputeSession, Retention
from tests.ut.chunk.stacks import (
    Stack,
    added,
    chain,
    containers,
    micro_batch,
    mlp,
    one_region,
    plain_gradients,
    several_calls,
    views,
)

KINDS = (one_region, chain, several_calls, mlp)


def chunk_of(stack: Callable, number: int, weights: list[Parameter], *steps: str) -> Chunk:
    """A chunk of stage 3 after its forward and these steps."""
    x, grad = micro_batch(number)
    chunk = Chunk(3, number, weights)
    chunk.forward(stack, x)
    for step in steps:
        getattr(chunk, step)(*([grad] if step in ("backward", "backward_input") else []))
    return chunk


def gradients(weights: list[Parameter]) -> list[np.ndarray | None]:
    """What has been added up for the weights; forgotten afterwards."""
    found = [autograd.gradient_of(weight) for weight in weights]
    for weight in weights:
        autograd.clear_gradient(weight)
    return [None if one is None else one.asnumpy() for one in found]


def assert_same(seen: list, expected: list) -> None:
    assert len(seen) == len(expected)
    for one, other in zip(seen, expected):
        np.testing.assert_array_equal(one, other)


# Order ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("done", "asked", "message"),
    [
        (
            None,
            "recompute",
            r"recompute: needs a chunk that is 'forwarded' or 'recomputed', but it is 'new'; call forward",
        ),
        (None, "backward", r"backward: needs .* but it is 'new'; call forward first\."),
        (None, "backward_input", r"backward_input: needs .* but it is 'new'; call forward first\."),
        (
            (),
            "backward_weight",
            r"'dx done', but it is 'forwarded'; it waits for recompute, backward or backward_input\.",
        ),
        ((), "forward", r"forward: needs a chunk that is 'new', but it is 'forwarded'"),
        (("recompute",), "backward_weight", r"but it is 'recomputed'; it waits for backward or backward_input\."),
        (("backward_input",), "backward", r"but it is 'dx done'; it waits for backward_weight\."),
        (("backward_input",), "backward_input", r"but it is 'dx done'; it waits for backward_weight\."),
        (("backward_input",), "recompute", r"but it is 'dx done'; it waits for backward_weight\."),
        (("backward_input", "backward_weight"), "backward_weight", r"but it is 'released'; make a new chunk\."),
        (("backward",), "backward", r"but it is 'released'; make a new chunk\."),
        (("release",), "backward_input", r"but it is 'released'; make a new chunk\."),
    ],
)
def test_a_step_out_of_order_says_so_and_changes_nothing(done: tuple | None, asked: str, message: str) -> None:
    stack = Stack(KINDS, wrapped=True)
    _, grad = micro_batch(2)
    chunk = Chunk(3, 2, stack.weights) if done is None else chunk_of(stack, 2, stack.weights, *done)
    state = chunk.state
    arguments = {"forward": [stack, grad], "backward": [grad], "backward_input": [grad]}.get(asked, [])
    with pytest.raises(ChunkError, match="^stage 3, micro-batch 2, " + asked) as caught:
        getattr(chunk, asked)(*arguments)
    assert chunk.state is state
    caught.match(message)
    assert "\n" not in str(caught.value)
    if state in (ChunkState.FORWARDED, ChunkState.RECOMPUTED):
        chunk.backward_input(grad)
    if chunk.state is ChunkState.INPUT_DONE:
        gradients(stack.weights)
        chunk.backward_weight()
        assert_same(gradients(stack.weights), plain_gradients(Stack(KINDS, wrapped=False), 2)[1])


def test_recompute_twice_and_in_parts_replays_each_block_once() -> None:
    stack = Stack(KINDS, wrapped=True)
    chunk = chunk_of(stack, 0, stack.weights, "recompute", "recompute", "backward")
    assert stack.runs()[0] == [2] * len(KINDS)
    stack.forget_runs()
    chunk = chunk_of(stack, 0, stack.weights)
    for last, replayed in ((0, 0), (1, 1), (1, 1), (3, 3), (99, 4), (None, 4)):
        chunk.recompute(last)
        assert stack.runs()[0] == [1] * (4 - replayed) + [2] * replayed
    chunk.backward(micro_batch(0)[1])
    assert stack.runs()[0] == [2] * len(KINDS)


# What is retained -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("retain", [True, False])
def test_reading_keeps_a_recomputed_tensor_only_where_it_is_to_be_retained(retain: bool) -> None:
    stack = Stack((mlp, one_region), wrapped=True)
    x, grad = micro_batch(0)
    session = RecomputeSession("test")
    with session.collecting(), autograd.recording():
        output = stack(x)
    with session.reading(retain=True):
        session.replay()
    made = len(list(session.tensors()))
    wanted = [x, *stack.weights]
    with session.reading(retain):
        first = autograd.run_backward([output], [grad], wanted, keep_graph=True)
    # A region's input may have several readers: it goes with the operators that saved its handle.
    assert len(list(session.tensors())) == (made if retain else 1)
    with session.reading(retain=False):
        if retain:
            second = autograd.run_backward([output], [grad], wanted, keep_graph=False)
            assert_same(
                [one.asnumpy() for one in second if one is not None], [g.asnumpy() for g in first if g is not None]
            )
        else:
            with pytest.raises(RuntimeError):
                autograd.run_backward([output], [grad], wanted, keep_graph=False)
    assert stack.runs()[0] == [2, 2]
    del output
    assert list(session.tensors()) == []


class Witness(autograd.Function):
    """x * 1; its backward notes what it saved in its forward and what it reads."""

    read: ClassVar[list[tuple[bytes, bytes]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.expected = x.asnumpy().tobytes()
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Witness.read.append((ctx.expected, ctx.saved_tensors[0].asnumpy().tobytes()))
        return grad


def test_a_handle_is_bound_to_its_own_invocation_and_not_cleared_before_its_last_reader() -> None:
    weight = Parameter(Tensor(np.eye(4, dtype=np.float32) * 1.5), name="weight")
    region = checkpoint_exclude_wrapper(lambda x: mint.matmul(Witness.apply(x), weight))

    def block(x: Tensor) -> Tensor:
        return region(ops.tanh(region(ops.sin(x)))) + region(ops.cos(x))

    def stack(x: Tensor) -> Tensor:
        return checkpoint(block, checkpoint(block, x))

    count = 3
    Witness.read = []
    chunks = [chunk_of(stack, number, [weight]) for number in range(count)]
    for number in (2, 0, 1):
        chunks[number].recompute(last=1 + number % 2)
    for number in (1, 2, 0):
        chunks[number].backward_input(micro_batch(number)[1])
    seen_in_dx = len(Witness.read)
    for number in (2, 1, 0):
        chunks[number].backward_weight()
    assert seen_in_dx == count * 6
    assert len({expected for expected, _ in Witness.read}) == count * 6
    assert all(expected == read for expected, read in Witness.read)


def test_two_sessions_on_one_block_each_get_their_own_replay() -> None:
    plain = Stack(KINDS, wrapped=False)
    stack = Stack(KINDS, wrapped=True)
    first, second = (chunk_of(stack, number, stack.weights, "recompute") for number in (0, 1))
    assert stack.runs()[0] == [4] * len(KINDS)
    grads = [chunk.backward_input(micro_batch(number)[1])[0] for number, chunk in ((1, second), (0, first))]
    assert_same([grad.asnumpy() for grad in grads], [plain_gradients(plain, number)[0] for number in (1, 0)])
    first.backward_weight()
    second.backward_weight()
    assert stack.runs()[0] == [4] * len(KINDS)
    assert_same(gradients(stack.weights), added([plain_gradients(plain, number)[1] for number in (0, 1)]))


BYTES = 8 * 4 * 4
"""Of one activation of a micro-batch."""


def _held(block: Callable, steps: tuple[str, ...], weights: list[Parameter], retention: Retention | None) -> list[int]:
    x, grad = micro_batch(0)
    chunk = Chunk(0, 0, weights, retention)
    held = [chunk.held_bytes()]
    chunk.forward(block, x)
    held.append(chunk.held_bytes())
    for step in steps:
        getattr(chunk, step)(*([grad] if step in ("backward", "backward_input") else []))
        held.append(chunk.held_bytes())
    return [size / BYTES for size in held]


SPLIT = ("recompute", "backward_input", "backward_weight")


@pytest.mark.parametrize("retention", [None, Retention()])
@pytest.mark.parametrize(
    ("excluded", "expected"),
    [
        # x | x and tanh(xU) | x and tanh(xU), which matmul reads, and the gradients of xU and of the output | nothing
        (False, [0, 1, 2, 4, 0]),
        # The same and the cached tanh(xU) V, which is not the output, before its replay; then the square reads it.
        (True, [0, 2, 3, 4, 0]),
    ],
)
def test_held_bytes_of_a_checkpointed_block(excluded: bool, expected: list[int], retention: Retention | None) -> None:
    up, down = (Parameter(Tensor(np.eye(4, dtype=np.float32)), name=name) for name in ("up", "down"))

    def block(x: Tensor) -> Tensor:
        return mint.matmul(ops.tanh(mint.matmul(x, up)), down)

    region = checkpoint_exclude_wrapper(lambda x: mint.matmul(x, down))

    def block_with_region(x: Tensor) -> Tensor:
        return ops.square(region(ops.tanh(mint.matmul(x, up))))

    fn = block_with_region if excluded else block
    assert _held(lambda x: checkpoint(fn, x), SPLIT, [up, down], retention) == expected


@pytest.mark.parametrize("last", [None, 1, 2])
def test_after_dx_no_more_is_held_where_blocks_were_replayed_before(last: int | None) -> None:
    """A saved tensor keeps the operator that made it: what that one saved must be dropped as it is read."""
    weight = Parameter(Tensor(np.eye(4, dtype=np.float32)), name="weight")

    def block(x: Tensor) -> Tensor:
        h = mint.matmul(x, weight)
        return mint.matmul(ops.silu(h) * ops.tanh(h), weight)

    def held(*steps: Callable[[Chunk], None]) -> tuple[int, int]:
        x, grad = micro_batch(0)
        before = live_tensor_count()
        chunk = Chunk(3, 0, [weight])
        chunk.forward(lambda x: checkpoint(block, checkpoint(block, x)), x)
        for step in steps:
            step(chunk)
        chunk.backward_input(grad)
        return chunk.held_bytes(), live_tensor_count() - before

    assert held(lambda chunk: chunk.recompute(last)) == held()


def test_held_bytes_without_checkpoint_are_seen_once_and_known_afterwards() -> None:
    up, down = (Parameter(Tensor(np.eye(4, dtype=np.float32)), name=name) for name in ("up", "down"))

    def block(x: Tensor) -> Tensor:
        return mint.matmul(ops.tanh(mint.matmul(x, up)), down)

    retention = Retention()
    # x and tanh(xU) | the same and two gradients | nothing
    expected = [0, 2, 4, 0]
    assert _held(block, ("backward_input", "backward_weight"), [up, down], retention) == expected
    assert _held(block, ("backward_input", "backward_weight"), [up, down], retention) == expected
    # What operators save is not seen without a retention: the leaf, then what waits.
    assert _held(block, ("backward_input", "backward_weight"), [up, down], None) == [0, 1, 2, 0]


# Letting go -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [(), ("recompute",), ("backward_input",), ("recompute", "backward_input")])
def test_release_in_any_state_leaves_nothing_behind(steps: tuple[str, ...]) -> None:
    stack = Stack((*KINDS, views, containers), wrapped=True)
    chunk_of(stack, 0, stack.weights, "backward")
    gradients(stack.weights)
    micro_batches = [micro_batch(number) for number in range(2)]
    before = live_tensor_count()
    other = Chunk(3, 1, stack.weights)
    other.forward(stack, micro_batches[1][0])
    other.recompute(2)
    chunk = Chunk(3, 0, stack.weights)
    chunk.forward(stack, micro_batches[0][0])
    for step in steps:
        getattr(chunk, step)(*([micro_batches[0][1]] if step == "backward_input" else []))
    chunk.release()
    chunk.release()
    assert (chunk.state, chunk.held_bytes()) == (ChunkState.RELEASED, 0)
    other.backward(micro_batches[1][1])
    assert_same(gradients(stack.weights), plain_gradients(Stack((*KINDS, views, containers), wrapped=False), 1)[1])
    assert live_tensor_count() == before
    assert not _recompute_session_handles


def test_a_chunk_that_is_dropped_lets_its_session_go() -> None:
    stack = Stack(KINDS, wrapped=True)
    before = live_tensor_count()
    chunk = chunk_of(stack, 0, stack.weights, "recompute")
    assert _recompute_session_handles
    del chunk
    assert live_tensor_count() == before
    assert not _recompute_session_handles


# Errors ---------------------------------------------------------------------------------------------------------------
class Planted(Exception):
    """Raised where a test wants it."""


class Passing(autograd.Function):
    """x * 1; its backward raises when a test wants it."""

    armed: str | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _raise_at(ctx.name)
        return grad, None


def _raise_at(place: str) -> None:
    if Passing.armed == place:
        mindspore.manual_seed(99)
        raise Planted("planted", 7)


@contextlib.contextmanager
def planted(place: str) -> Iterator[None]:
    """Raise `Planted` at a place: block, replay, region, dx or dw. It changes the random state first."""
    Passing.armed = place
    try:
        yield
    finally:
        Passing.armed = None


class Step:
    """Three micro-batches of a two-block stage, all forwards first; dw after all dx."""

    def __init__(self, prefire: bool, split: bool) -> None:
        rng = np.random.default_rng(5)
        self.weights = [
            Parameter(Tensor(rng.standard_normal((4, 4)).astype(np.float32)), name=f"w{at}") for at in range(2)
        ]
        self.region = checkpoint_exclude_wrapper(self._region)
        self.prefire, self.split = prefire, split

    def _region(self, x: Tensor) -> Tensor:
        _raise_at("region")
        return mint.matmul(x, Passing.apply(self.weights[0], "dw"))

    def _block(self, x: Tensor) -> Tensor:
        _raise_at("replay" if is_recomputing() else "block")
        return ops.tanh(self.region(ops.sin(x))) + mint.matmul(Passing.apply(x, "dx"), self.weights[1])

    def _stage(self, x: Tensor) -> Tensor:
        return checkpoint(self._block, checkpoint(self._block, x))

    def run(self, place: str | None = None) -> list[np.ndarray]:
        """The gradients of inputs and weights. `place`: where micro-batch 2 fails."""
        chunks = [Chunk(1, number, self.weights) for number in range(3)]
        grads: list[Any] = []
        try:
            for step in self._steps():
                for number, chunk in enumerate(chunks):
                    x, grad = micro_batch(number)
                    arguments = {"forward": [self._stage, x], "backward": [grad], "backward_input": [grad]}.get(
                        step, []
                    )
                    with planted(place) if number == 2 and place is not None else contextlib.nullcontext():
                        done = getattr(chunk, step)(*arguments)
                    grads.extend(done if step in ("backward", "backward_input") else [])
        finally:
            for chunk in chunks:
                chunk.release()
        return [grad.asnumpy() for grad in grads] + gradients(self.weights)

    def _steps(self) -> list[str]:
        backward = ["backward_input", "backward_weight"] if self.split else ["backward"]
        return ["forward", *(["recompute"] if self.prefire else []), *backward]


@pytest.mark.parametrize(
    ("place", "prefire", "split", "step"),
    [
        ("block", False, True, "forward"),
        ("region", False, True, "forward"),
        ("replay", True, True, "recompute"),
        ("replay", False, True, "backward_input"),
        ("replay", False, False, "backward"),
        ("dx", False, True, "backward_input"),
        ("dx", True, True, "backward_input"),
        ("dx", True, False, "backward"),
        ("dw", True, True, "backward_weight"),
        ("dw", False, True, "backward_weight"),
        ("dw", False, False, "backward"),
    ],
)
def test_an_error_keeps_its_type_names_the_step_and_leaves_no_trace(
    place: str, prefire: bool, split: bool, step: str
) -> None:
    expected = Step(prefire, split).run()
    stage = Step(prefire, split)
    assert_same(stage.run(), expected)
    tensors = live_tensor_count()
    mindspore.manual_seed(3)
    random_state = mindspore.get_rng_state().asnumpy().tobytes()
    flags = _flags()
    with pytest.raises(Planted) as caught:
        stage.run(place)
    assert caught.value.args == (f"stage 1, micro-batch 2, {step}: planted", 7)
    del caught
    gradients(stage.weights)
    assert mindspore.get_rng_state().asnumpy().tobytes() == random_state
    assert _flags() == flags
    assert _recompute_session.get() is None and not _recompute_session_handles
    assert live_tensor_count() == tensors
    assert_same(stage.run(), expected)
    assert live_tensor_count() == tensors


def _flags() -> tuple[bool, ...]:
    executor = autograd._pynative_executor
    return executor.grad_flag(), executor.enable_grad(), executor.requires_grad()


def test_an_error_without_a_message_or_with_another_first_argument_keeps_its_arguments() -> None:
    for error, expected in ((KeyError(3), (3,)), (StopIteration(), ("stage 0, micro-batch 2, forward",))):

        def fails(_: Tensor, error: Exception = error) -> Tensor:
            raise error

        with pytest.raises(type(error)) as caught:
            Chunk(0, 2, []).forward(fails, micro_batch(0)[0])
        assert caught.value.args == expected
        if hasattr(error, "add_note") and expected == (3,):
            assert caught.value.__notes__ == ["stage 0, micro-batch 2, forward"]


# Threads --------------------------------------------------------------------------------------------------------------
def test_recompute_on_one_thread_and_dx_on_another() -> None:
    expected = plain_gradients(Stack(KINDS, wrapped=False), 0)
    stack = Stack(KINDS, wrapped=True)
    x, grad = micro_batch(0)
    replaying = threading.Event()
    inner = stack.blocks[0].body.fn

    def tells(value: Tensor) -> Tensor:
        if is_recomputing():
            replaying.set()
        return inner(value)

    stack.blocks[0].body.fn = tells
    with ThreadPoolExecutor(1) as recomputing:
        for _ in range(200):
            replaying.clear()
            stack.forget_runs()
            chunk = Chunk(0, 0, stack.weights)
            chunk.forward(stack, x)
            done = recomputing.submit(chunk.recompute)
            assert replaying.wait(60)
            (input_grad,) = chunk.backward_input(grad)
            done.result()
            chunk.backward_weight()
            assert stack.runs()[0] == [2] * len(KINDS)
            np.testing.assert_array_equal(input_grad.asnumpy(), expected[0])
            assert_same(gradients(stack.weights), expected[1])


def test_recompute_of_the_next_micro_batch_on_another_thread() -> None:
    plain = Stack(KINDS, wrapped=False)
    expected = [plain_gradients(plain, number) for number in range(2)]
    stack = Stack(KINDS, wrapped=True)
    data = [micro_batch(number) for number in range(2)]
    with ThreadPoolExecutor(1) as recomputing:
        for _ in range(50):
            stack.forget_runs()
            chunks = [Chunk(0, number, stack.weights) for number in range(2)]
            for chunk, (x, _) in zip(chunks, data):
                chunk.forward(stack, x)
            chunks[0].recompute()
            done = recomputing.submit(chunks[1].recompute)
            input_grads = [chunks[0].backward_input(data[0][1])[0].asnumpy()]
            chunks[0].backward_weight()
            done.result()
            input_grads.append(chunks[1].backward_input(data[1][1])[0].asnumpy())
            chunks[1].backward_weight()
            assert stack.runs()[0] == [4] * len(KINDS)
            assert_same(input_grads, [grads[0] for grads in expected])
            assert_same(gradients(stack.weights), added([grads[1] for grads in expected]))
