"""A replay does not run the last matmul of a block, once an earlier one has shown what that matmul saves."""

from __future__ import annotations

import gc
import itertools
import warnings

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, ops, saved_tensors_hooks
from mindspore.graph.api import _no_grad

from hyper_parallel.core.activation_checkpoint import (
    checkpoint_exclude_wrapper,
    checkpoint_wrapper,
    is_recomputing,
)
from hyper_parallel.platform.mindspore import early_stop
from hyper_parallel.platform.mindspore.autograd import Function, recording, run_backward
from hyper_parallel.platform.mindspore.early_stop import Endings, _Place
from hyper_parallel.platform.mindspore.memory import live_tensor_count


class Block:
    """Runs a body under a checkpoint, and counts the replays that come to its end."""

    def __init__(self, body) -> None:
        self.body = body
        self.ends = 0
        self.call = checkpoint_wrapper(self._run)

    def _run(self, *args):
        result = self.body(*args)
        self.ends += is_recomputing()
        return result


def check(body, args, value_and_grads, assert_same, ends, steps=3):
    """Every step gives what the plain body gives, and as many replays as expected come to their end."""
    block = Block(body)
    plain = value_and_grads(body, args, args)
    for expected in itertools.islice(ends, steps):
        assert_same(value_and_grads(block.call, args, args), plain)
        assert block.ends == expected
    return block


ONLY_THE_FIRST = [1, 1, 1]
EVERY_ONE = [1, 2, 3]


@pytest.mark.parametrize(
    "multiply",
    [mint.matmul, ops.matmul, ops.dense, lambda x, w: mint.bmm(x.reshape(1, 4, 4), w.reshape(1, 4, 4)).reshape(4, 4)],
    ids=["mint.matmul", "ops.matmul", "dense", "bmm"],
)
def test_the_last_matmul_runs_in_the_first_replay_only(multiply, leaf, value_and_grads, assert_same):
    def mlp(x, up, down):
        return x + multiply(ops.relu(multiply(x, up)), down)

    check(mlp, [leaf(4, 4), leaf(4, 4), leaf(4, 4)], value_and_grads, assert_same, ONLY_THE_FIRST)


def test_a_block_of_one_matmul(leaf, value_and_grads, assert_same):
    check(lambda x, w: mint.matmul(x, w) + x, [leaf(4, 4), leaf(4, 4)], value_and_grads, assert_same, ONLY_THE_FIRST)


def test_after_an_excluded_region(leaf, value_and_grads, assert_same):
    region = checkpoint_exclude_wrapper(lambda x, w: mint.matmul(x, w))

    def body(x, first, second):
        return mint.matmul(region(ops.tanh(x), first), second) + x

    check(body, [leaf(4, 4), leaf(4, 4), leaf(4, 4)], value_and_grads, assert_same, ONLY_THE_FIRST)


def test_an_operand_that_is_copied_before_it_is_saved(leaf, value_and_grads, assert_same):
    """A transposed view: what is saved may be a copy, then the matmul goes on to run."""
    block = check(
        lambda x, w: mint.matmul(ops.relu(x), w.swapaxes(0, 1)) + x,
        [leaf(4, 4), leaf(4, 4)],
        value_and_grads,
        assert_same,
        itertools.repeat(1),
        steps=1,
    )
    x, w = leaf(4, 4), leaf(4, 4)
    for _ in range(3):
        assert_same(value_and_grads(block.call, [x, w], [x, w]), value_and_grads(block.body, [x, w], [x, w]))


def test_a_frozen_operand(leaf, rng, value_and_grads, assert_same):
    x, frozen = leaf(4, 4), Tensor(rng.randn(4, 4).astype(np.float32))
    plain = value_and_grads(lambda x: mint.matmul(ops.tanh(x), frozen) + x, [x], [x])
    block = Block(lambda x: mint.matmul(ops.tanh(x), frozen) + x)
    for _ in range(3):
        assert_same(value_and_grads(block.call, [x], [x]), plain)


def _own_hooks():
    return saved_tensors_hooks(lambda tensor: tensor.data, lambda tensor: tensor)


@pytest.mark.parametrize("other", [_no_grad, _own_hooks], ids=["no_grad", "hooks of the user's own"])
def test_a_matmul_that_saves_nothing_is_not_taken_for_the_one_that_does(other, leaf, value_and_grads, assert_same):
    """Both are called after the same number of saved tensors, with operands of the same kind."""

    def body(x, v, w):
        with other():
            y = mint.matmul(x, v)
        return mint.matmul(x + y, w) + x

    args = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    plain, block = value_and_grads(body, args, args), Block(body)
    for _ in range(3):
        assert_same(value_and_grads(block.call, args, args), plain)


def check_calls(body, calls, wrt, value_and_grads, assert_same):
    """One wrapper, whose replays learn of one kind of call what does not hold for another: each is as the plain one."""
    call = checkpoint_wrapper(body)
    for args in calls:
        assert_same(value_and_grads(call, args, wrt), value_and_grads(body, args, wrt))


def test_operands_that_are_one_tensor_do_not_tell_which_is_saved_first(leaf, value_and_grads, assert_same):
    x, y = leaf(4, 4), leaf(4, 4)
    calls = [(x, x), (x, x), (x, y), (x, y), (y, x), (x, x)]
    check_calls(lambda a, b: mint.matmul(a, b) + a, calls, [x, y], value_and_grads, assert_same)


def test_hooks_of_the_users_own_that_come_later(leaf, value_and_grads, assert_same):
    """The matmul under them comes at the place, and with operands of the kind, of the one that was learned."""

    def body(x, v, w, hooked):
        y = v
        if hooked:
            with _own_hooks():
                y = mint.matmul(x, v)
        return mint.matmul(x + y, w) + x

    tensors = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    calls = [(*tensors, hooked) for hooked in (False, False, True, True, False)]
    check_calls(body, calls, tensors, value_and_grads, assert_same)


class _TimesFrozen(Function):
    """A user's function that saves, without calling an operator, what the matmul before it has saved."""

    @staticmethod
    def forward(ctx, x, frozen):
        ctx.save_for_backward(frozen)
        return x.data

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def test_what_a_function_saves_is_not_taken_for_the_matmuls(leaf, rng, value_and_grads, assert_same):
    frozen = Tensor(rng.randn(4, 4).astype(np.float32))

    def body(x, own):
        product = mint.matmul(x, frozen)
        return _TimesFrozen.apply(product, frozen) if own else ops.tanh(product)

    x = leaf(4, 4)
    calls = [(x, own) for own in (True, True, False, False, True)]
    check_calls(body, calls, [x], value_and_grads, assert_same)


def test_a_block_that_catches_what_ends_its_replay(leaf, value_and_grads, assert_same):
    def body(x, w):
        try:
            return mint.matmul(ops.tanh(x), w)
        except Exception:
            return x * w

    x, w = leaf(4, 4), leaf(4, 4)
    check_calls(body, [(x, w)] * 3, [x, w], value_and_grads, assert_same)


def test_a_place_that_was_seen_in_two_ways_is_not_certain():
    place = _Place("Dense", 0, 2, ())
    endings = Endings()
    for operands, expected in [((0, 1), (0, 1)), ((0, 1), (0, 1)), ((), ()), ((0, 1), ())]:
        endings.learn(place, operands)
        assert endings.operands_saved(place) == expected


def test_matmuls_of_an_inner_block_are_not_the_outer_ones(leaf, value_and_grads, assert_same):
    args = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    inner = checkpoint_wrapper(lambda x, w: mint.matmul(x, w))

    def outer(x, v, w):
        return mint.matmul(inner(ops.tanh(x), v), w) + x

    plain, call = value_and_grads(outer, args, args), checkpoint_wrapper(outer)
    for _ in range(3):
        assert_same(value_and_grads(call, args, args), plain)


def test_a_region_that_runs_again_is_not_stopped(leaf):
    """The second backward finds the region's output released; its matmul comes where the block's own did."""
    region = checkpoint_exclude_wrapper(lambda x, w: mint.matmul(x, w))

    def body(x, v, w):
        return mint.matmul(region(x, v), w) + x

    x, v, w = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    call = checkpoint_wrapper(body)
    for _ in range(2):
        with recording():
            out, plain = call(x, v, w), body(x, v, w)
        expected = run_backward([plain], [ops.ones_like(plain)], [x, v, w], False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the region runs again is what is wanted here
            for keep_graph in (True, False):
                found = run_backward([out], [ops.ones_like(out)], [x, v, w], keep_graph)
                for one, other in zip(found, expected):
                    np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def test_the_random_state_and_the_number_of_tensors_stay(leaf, value_and_grads):
    args = [leaf(4, 4), leaf(4, 4), leaf(4, 4)]
    block = Block(lambda x, up, down: mint.matmul(ops.relu(mint.matmul(x, up)), down) + x)
    counts = []
    for _ in range(12):
        mindspore.set_seed(3)
        with recording():
            out = block.call(*args)
        before = mindspore.get_rng_state().asnumpy()
        run_backward([out], [ops.ones_like(out)], args, False)
        np.testing.assert_array_equal(mindspore.get_rng_state().asnumpy(), before)
        del out
        gc.collect()
        counts.append(live_tensor_count())
    assert block.ends == 1
    assert len(set(counts[2:])) == 1


def test_operators_are_not_watched_where_none_is_expensive(leaf, value_and_grads, assert_same, monkeypatch):
    watched = []

    class Watching(early_stop.Stopper):
        def __ms_dispatch__(self, func, args, kwargs=None):
            watched.append(func.name)
            return super().__ms_dispatch__(func, args, kwargs)

    monkeypatch.setattr(early_stop, "Stopper", Watching)
    x, w = leaf(4, 4), leaf(4, 4)
    block = Block(lambda x, w: ops.square(ops.tanh(ops.exp(mint.matmul(x, w)))))
    plain = value_and_grads(block.body, [x, w], [x, w])
    counts = []
    for _ in range(6):
        watched.clear()
        assert_same(value_and_grads(block.call, [x, w], [x, w]), plain)
        counts.append(len(watched))
    assert counts[0] > 0 and counts[-1] == 0
