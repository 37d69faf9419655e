"""What an excluded region keeps alive between forward and backward (rules 3, 5), and changes in place."""

from __future__ import annotations

import mindspore
import pytest
from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function

from hyper_parallel.core.activation_checkpoint import checkpoint, checkpoint_exclude_wrapper
from hyper_parallel.platform.mindspore.activation_checkpoint.input_handle import pack, unpack
from hyper_parallel.platform.mindspore.autograd import recording, run_backward


class ReturnsItsInput(_Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor

    @staticmethod
    def backward(ctx, grad):
        return grad


PRODUCERS = {
    "operator": (ops.tanh, (6, 10)),
    "reshape": (lambda x: ops.tanh(x).reshape(10, 6), (10, 6)),
    "reshape to the same shape": (lambda x: ops.tanh(x).reshape(6, 10), (6, 10)),
    "slice": (lambda x: ops.tanh(x)[1:], (5, 10)),
    "transpose": (lambda x: ops.tanh(x).transpose(1, 0), (10, 6)),
    "split": (lambda x: ops.split(ops.tanh(x), 3)[1], (3, 10)),
    "custom function": (lambda x: ReturnsItsInput.apply(ops.tanh(x)), (6, 10)),
    "leaf": (lambda x: ops.stop_gradient(ops.tanh(x)), (6, 10)),
    "leaf view": (lambda x: ops.stop_gradient(ops.tanh(x).reshape(10, 6)), (10, 6)),
    "half precision view": (lambda x: ops.tanh(x).astype(mindspore.float16).reshape(10, 6), (10, 6)),
}


@pytest.mark.parametrize("producer", PRODUCERS)
def test_gradients_of_all_uses_of_an_input_are_added_in_the_order_of_the_plain_program(
    leaf, value_and_grads, assert_same, producer
):
    make, _ = PRODUCERS[producer]
    x = leaf(6, 10)

    def region(a):
        return ops.tanh(a * 3), ops.exp(a) / 7

    def program(inner):
        made = make(x * 2)

        def block(a):
            one, other = inner(a)
            return (one * 5 + other).astype(mindspore.float32)

        used = checkpoint(block, made) if inner is not region else block(made)
        return (used + made.astype(mindspore.float32) * 0.3).sum() + x.sum()

    plain = value_and_grads(lambda: program(region), (), [x])
    assert_same(value_and_grads(lambda: program(checkpoint_exclude_wrapper(region)), (), [x]), plain)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_saved_input_is_not_kept_alive_whatever_made_it(leaf, alive, value_and_grads, assert_same, producer):
    make, shape = PRODUCERS[producer]
    x = leaf(6, 10)
    w = leaf(shape[1], 13)

    def region(a, b):
        return mint.matmul(a, b.astype(a.dtype))

    def block(a, b, inner):
        made = make(a * 2)
        return (ops.square(inner(made, b)).sum() + ops.exp(made).sum()).astype(mindspore.float32)

    plain = value_and_grads(lambda: block(x, w, region), (), [x, w])
    excluded = checkpoint_exclude_wrapper(region)
    keeping = checkpoint_exclude_wrapper(region, keep_inputs=True)
    before = alive(*shape)
    with recording():
        out = checkpoint(block, x, w, excluded)
        assert alive(*shape) == before
        again = checkpoint(block, x, w, keeping)
        assert alive(*shape) == before + 1
        grads = run_backward([out], [ops.ones_like(out)], [x, w], False)
        grads_again = run_backward([again], [ops.ones_like(again)], [x, w], False)
    for found in ([out, *grads], [again, *grads_again]):
        assert_same([None if tensor is None else tensor.asnumpy() for tensor in found], plain)
    found.clear()
    del grads, grads_again
    assert alive(*shape) <= before + 1


def test_an_input_that_the_region_does_not_save_is_not_made_to_stay(leaf, alive):
    x = leaf(6, 10)
    region = checkpoint_exclude_wrapper(lambda a: a + 1)
    with recording():
        out = checkpoint(lambda a: ops.square(region(ops.tanh(a))).sum(), x)
        assert alive(6, 10) == 2, "x and the region's output"
        run_backward([out], [ops.ones_like(out)], [x], True)
        assert alive(6, 10) == 1, "x: the output was released with the first replay"


def test_parameters_and_outputs_of_the_same_invocation_are_kept_not_deferred(leaf, alive):
    x = leaf(6, 10)
    square = checkpoint_exclude_wrapper(ops.square)
    exp = checkpoint_exclude_wrapper(lambda a: ops.square(a))
    with recording():
        out = checkpoint(lambda a: exp(square(ops.tanh(a))).sum(), x)
        assert alive(6, 10) == 3, "x and both outputs; the first output also serves as the second region's input"
        run_backward([out], [ops.ones_like(out)], [x], False)


def test_reading_a_handle_that_no_replay_has_made_is_an_error_never_the_old_tensor(leaf, monkeypatch):
    x = leaf(4, 4)
    region = checkpoint_exclude_wrapper(ops.square)

    def block(a, replay):
        h = ops.tanh(a)
        return region(h).sum() if not replay else h.sum()

    from hyper_parallel.platform.mindspore.recompute import BlockHandle

    with recording():
        out = checkpoint(block, x, False)
        monkeypatch.setattr(BlockHandle, "recompute", lambda self, key: None)
        with pytest.raises(RuntimeError, match=r"no replay of block .* has made it"):
            run_backward([out], [ops.ones_like(out)], [x], False)


def test_marks_end_with_the_region_also_when_it_raises(leaf):
    x = leaf(4, 4)
    seen = []

    @checkpoint_exclude_wrapper
    def region(a, fail):
        seen.append(a)
        if fail:
            raise KeyError("mine")
        return ops.square(a)

    def block(a, fail):
        h = ops.tanh(a)
        region(h, False)
        region(h, fail)
        return region(h, False).sum()

    with recording():
        for fail in (True, False):
            try:
                checkpoint(block, x, fail)
            except KeyError as error:
                assert error.args == ("mine",)
            assert all(isinstance(pack(tensor), Tensor) for tensor in seen)
    assert unpack(x) is x


@pytest.mark.parametrize("keep_inputs", [False, True])
@pytest.mark.parametrize("made_by", ["operator", "view", "region"])
def test_a_change_in_place_is_an_error_that_names_the_region(leaf, made_by, keep_inputs):
    x, y = leaf(4, 4), leaf(4, 4)
    makers = {
        "operator": ops.tanh,
        "view": lambda a: ops.tanh(a).reshape(2, 8).reshape(4, 4),
        "region": checkpoint_exclude_wrapper(ops.tanh),
    }

    def overwrites(a, b):
        b.copy_(ops.exp(a))
        return ops.square(b)

    region = checkpoint_exclude_wrapper(overwrites, keep_inputs=keep_inputs)
    with recording(), pytest.raises(RuntimeError, match=r"overwrites' changed its input 1 .* in place.*copy"):
        checkpoint(lambda a, b: region(ops.tanh(a), makers[made_by](b)).sum(), x, y)


def test_an_input_that_a_region_returns_is_deferred_by_the_next_one(leaf, alive, value_and_grads, assert_same):
    x = leaf(6, 10)
    returns, saves = (lambda a: (a, a.sum())), ops.square

    def block(a, one, other):
        same, total = one(ops.tanh(a))
        return other(same).sum() * total

    wrapped = checkpoint_exclude_wrapper(returns), checkpoint_exclude_wrapper(saves)
    plain = value_and_grads(lambda: block(x, returns, saves), (), [x])
    with recording():
        out = checkpoint(block, x, *wrapped)
        assert alive(6, 10) == 2, "x and the output of the second region"
        grads = run_backward([out], [ops.ones_like(out)], [x], False)
    assert_same([out.asnumpy(), *[grad.asnumpy() for grad in grads]], plain)
