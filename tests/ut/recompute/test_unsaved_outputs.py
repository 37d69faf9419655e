"""Regions whose output is not saved: chains, misuse, and regions that find out by themselves (rule 11)."""

from __future__ import annotations

import pytest
from mindspore import mint, ops

from hyper_parallel.core.activation_checkpoint import (
    UnsavedOutputError,
    checkpoint,
    checkpoint_exclude_wrapper,
    is_recomputing,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore.autograd import Function, recording, run_backward


class SharesItsInput(Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.data

    @staticmethod
    def backward(ctx, grad):
        return grad


def first(a):
    return ops.exp(a) * 2


def plainly(fn, *args):
    return fn(*args)


MISUSES = {
    "operator": lambda a, b, unsaved: ops.square(unsaved(ops.tanh(a))) * b,
    "second operand": lambda a, b, unsaved: b * unsaved(ops.tanh(a)),
    "matmul": lambda a, b, unsaved: mint.matmul(b, unsaved(ops.tanh(a))) * b,
    "unpacked": lambda a, b, unsaved: ops.square(unsaved(ops.tanh(a))[0] * b),
    "inside a container": lambda a, b, unsaved: (
        checkpoint_exclude_wrapper(lambda pair: ops.square(pair[0]))((unsaved(ops.tanh(a)),)) * b
    ),
    "returned": lambda a, b, unsaved: unsaved(ops.tanh(a) * b),
    "returned in a container": lambda a, b, unsaved: [ops.tanh(b), unsaved(ops.tanh(a) * b)][1],
    "given to an inner block": lambda a, b, unsaved: checkpoint(
        lambda t, u: ops.square(t) * u, unsaved(ops.tanh(a) * b), b
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misused_output_is_an_error_that_names_the_region_and_the_next_step_works(
    leaf, value_and_grads, assert_same, misuse
):
    x, y = leaf(4, 4), leaf(4, 4)
    unsaved = checkpoint_exclude_wrapper(first, save_output=False)
    with pytest.raises(UnsavedOutputError, match=r"region 'first' is not saved .* use save_output=True"):
        value_and_grads(lambda: checkpoint(MISUSES[misuse], x, y, unsaved), (), [x, y])
    saved = checkpoint_exclude_wrapper(first)
    found, plain = (
        value_and_grads(lambda call=call, region=region: call(MISUSES["operator"], x, y, region), (), [x, y])
        for call, region in ((checkpoint, saved), (plainly, first))
    )
    assert_same(found, plain)


@pytest.mark.parametrize("save_outputs", [(False, "auto"), ("auto", "auto"), ("auto", True)])
@pytest.mark.parametrize("nested", [False, True])
def test_what_is_needed_is_found_out_and_gradients_are_right_from_the_first(
    leaf, value_and_grads, assert_same, save_outputs, nested
):
    x, y = leaf(4, 4), leaf(4, 4)
    regions = [checkpoint_exclude_wrapper(fn, save_output=how) for fn, how in zip((first, ops.square), save_outputs)]

    def block(a, b, chain):
        return ops.exp(-chain[1](chain[0](ops.tanh(a)))) * b

    def program(call, chain):
        if not nested:
            return call(block, x, y, chain)
        return call(lambda a, b: ops.tanh(call(block, ops.sigmoid(a), b, chain)) * b, x, y)

    plain = value_and_grads(lambda: program(plainly, (first, ops.square)), (), [x, y])
    for _ in range(3):
        assert_same(value_and_grads(lambda: program(checkpoint, regions), (), [x, y]), plain)


def test_an_output_that_is_needed_later_only_is_made_again(leaf, value_and_grads, assert_same):
    x, y = leaf(4, 4), leaf(4, 4)
    regions = (
        checkpoint_exclude_wrapper(first, save_output=False),
        checkpoint_exclude_wrapper(ops.square, save_output="auto"),
        checkpoint_exclude_wrapper(ops.exp),
    )

    def block(a, b, chain, by_operator):
        h = chain[1](chain[0](ops.tanh(a)))
        return (ops.sin(ops.tanh(h)) if by_operator else chain[2](-h)) * b

    for by_operator in (False, False, True, False, True):
        arguments = (x, y), (first, ops.square, ops.exp)
        plain = value_and_grads(lambda args=arguments, by=by_operator: block(*args[0], args[1], by), (), [x, y])
        found = value_and_grads(lambda by=by_operator: checkpoint(block, x, y, regions, by), (), [x, y])
        assert_same(found, plain)


def test_an_error_of_the_block_itself_is_not_blamed_on_an_unsaved_output(leaf, value_and_grads):
    x, y = leaf(4, 4), leaf(4, 4)
    unsaved, last = checkpoint_exclude_wrapper(first, save_output=False), checkpoint_exclude_wrapper(ops.square)

    def block(a, b):
        h = unsaved(ops.tanh(a))
        if is_recomputing():
            raise KeyError("mine")
        return last(h) * b

    with pytest.raises(KeyError, match="mine"):
        value_and_grads(lambda: checkpoint(block, x, y), (), [x, y])


@pytest.mark.parametrize("save_output", [True, "auto"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_region_may_hand_an_unsaved_output_on_as_its_own(leaf, value_and_grads, assert_same, save_output, nested):
    x, y = leaf(4, 4), leaf(4, 4)
    regions = (
        checkpoint_exclude_wrapper(first, save_output=False),
        checkpoint_exclude_wrapper(SharesItsInput.apply, save_output=save_output),
    )

    def block(a, b, chain):
        return chain[1](chain[0](ops.tanh(a) * b))

    def program(call, chain):
        if not nested:
            return call(block, x, y, chain)
        return call(lambda a, b: call(block, ops.tanh(a), b, chain) * b, x, y)

    plain = value_and_grads(lambda: program(plainly, (first, SharesItsInput.apply)), (), [x, y])
    for _ in range(3):
        assert_same(value_and_grads(lambda: program(checkpoint, regions), (), [x, y]), plain)


@pytest.mark.parametrize("nested", [False, True])
def test_a_region_that_finds_out_runs_once_where_one_block_needs_its_output_and_another_does_not(
    leaf, value_and_grads, assert_same, nested
):
    x, y = leaf(4, 4), leaf(4, 4)
    runs = []

    def counted(a):
        runs.append(1)
        return first(a)

    finds_out, last = checkpoint_exclude_wrapper(counted, save_output="auto"), checkpoint_exclude_wrapper(ops.square)
    chains = (finds_out, last), (first, ops.square)

    def into_a_region(a, chain):
        return ops.exp(-chain[1](chain[0](ops.tanh(a))))

    def into_an_operator(a, chain):
        return ops.square(chain[0](ops.tanh(a)))

    def both(a, b, call, chain):
        return call(into_a_region, a, chain) * call(into_an_operator, b, chain)

    def program(call, chain):
        return call(both, x, y, call, chain) if nested else both(x, y, call, chain)

    plain = value_and_grads(lambda: program(plainly, chains[1]), (), [x, y])
    for _ in range(3):
        runs.clear()
        assert_same(value_and_grads(lambda: program(checkpoint, chains[0]), (), [x, y]), plain)
        assert len(runs) == 2


@pytest.mark.parametrize("nested", [False, True])
def test_an_output_is_given_up_only_where_it_is_certain_that_no_replay_needs_it(leaf, nested):
    x = leaf(4, 4)
    finds_out, last = checkpoint_exclude_wrapper(first, save_output="auto"), checkpoint_exclude_wrapper(ops.square)

    def block(a):
        return ops.exp(-last(finds_out(ops.tanh(a))))

    def step(call):
        with recording():
            with get_platform().recompute_handle_collector_ctx() as handles:
                out = call(block, x)
            saved = [record.saved for handle in handles for record in handle.invocation.records]
            run_backward([out], [ops.ones_like(out)], [x], keep_graph=False)
        return saved

    def around(fn, a):
        return checkpoint(checkpoint, fn, a)

    assert [step(around if nested else checkpoint) for _ in range(2)] == [[True, True], [nested, True]]


def test_a_replay_that_stops_early_leaves_open_whether_an_output_is_needed(leaf, value_and_grads, assert_same):
    x, y = leaf(4, 4), leaf(4, 4)
    runs = []

    def counted(a):
        runs.append(1)
        return first(a)

    finds_out = checkpoint_exclude_wrapper(counted, save_output="auto")

    def block(a, b, region):
        h = region(ops.tanh(a))
        early = ops.exp(mint.matmul(b, b))
        return early, ops.square(mint.matmul(h, b))

    def gradients(call, region, which):
        with recording():
            out = call(block, x, y, region)[which]
            return [grad.asnumpy() for grad in run_backward([out], [ops.ones_like(out)], [y], keep_graph=False)]

    for which in (0, 1, 0, 1):
        runs.clear()
        assert_same(gradients(checkpoint, finds_out, which), gradients(plainly, first, which))
        assert len(runs) == 1
