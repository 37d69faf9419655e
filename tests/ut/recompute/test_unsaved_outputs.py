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
from hyper_parallel.platform.mindspore.autograd import Function


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
