"""Sessions, several backward passes, nested blocks, threads (rules 1, 2, 7)."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
from mindspore import mint, ops

from hyper_parallel.core.activation_checkpoint import checkpoint, checkpoint_exclude_wrapper, is_recomputing
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore.autograd import one_thread, recording, run_backward
from hyper_parallel.platform.mindspore.memory import live_tensor_count

platform = get_platform()


class Program:
    """A block with two excluded regions, that counts what runs."""

    def __init__(self, x, w):
        self.x, self.w = x, w
        self.runs = []
        self.excluded = checkpoint_exclude_wrapper(self.product)
        self.call = checkpoint

    def product(self, a, b):
        self.runs.append("region")
        return mint.matmul(a, b)

    def block(self, a, b):
        self.runs.append("block")
        return ops.square(self.excluded(ops.tanh(self.excluded(ops.tanh(a), b)), b))

    def forward(self):
        return self.call(self.block, self.x, self.w)

    def plain(self, value_and_grads):
        self.call = lambda fn, *args: fn(*args)
        found = value_and_grads(self.forward, (), [self.x, self.w])
        self.call = checkpoint
        self.runs.clear()
        return found


@pytest.fixture
def program(leaf):
    return Program(leaf(4, 6), leaf(6, 6))


def backward(out, wrt, keep_graph=False):
    return [grad.asnumpy() for grad in run_backward([out], [ops.ones_like(out)], wrt, keep_graph)]


def test_one_replay_for_dx_and_dw_in_a_session(program, value_and_grads, assert_same):
    plain = program.plain(value_and_grads)
    with recording():
        out = program.forward()
        with platform.recompute_session_ctx("step", retain_on_unpack=True):
            (dx,) = backward(out, [program.x], keep_graph=True)
        with platform.recompute_session_ctx("step", retain_on_unpack=False):
            (dw,) = backward(out, [program.w])
        platform.clear_recompute_session("step")
    assert_same([out.asnumpy(), dx, dw], plain)
    assert program.runs == ["block", "region", "region", "block"]


def test_prefired_replay_serves_the_backward(program, value_and_grads, assert_same):
    plain = program.plain(value_and_grads)
    with recording():
        with platform.recompute_handle_collector_ctx() as handles:
            out = program.forward()
        assert len(handles) == 1
        with platform.recompute_session_ctx("early", retain_on_unpack=True):
            platform.recompute_handle(handles[0], "early")
            platform.recompute_handle(handles[0], "early")
        assert program.runs == ["block", "region", "region", "block"]
        with platform.recompute_session_ctx("early"):
            grads = backward(out, [program.x, program.w])
        platform.clear_recompute_session("early")
    assert_same([out.asnumpy(), *grads], plain)
    assert program.runs == ["block", "region", "region", "block"]


def test_prefiring_outside_of_the_session_is_an_error(program):
    with recording(), platform.recompute_handle_collector_ctx() as handles:
        program.forward()
    with pytest.raises(ValueError, match="'mine', but the session entered on this thread is none"):
        platform.recompute_handle(handles[0], "mine")
    with platform.recompute_session_ctx("other"), pytest.raises(ValueError, match="is 'other'"):
        platform.recompute_handle(handles[0], "mine")


def test_records_live_while_a_session_retains_and_not_after_it_is_cleared(program, alive):
    with recording():
        with platform.recompute_handle_collector_ctx() as handles:
            out = program.forward()
        records = handles[0].invocation.records
        assert len(records) == 2
        with platform.recompute_session_ctx("kept", retain_on_unpack=True):
            backward(out, [program.x], keep_graph=True)
        assert all(record.outputs[0].tensor is not None for record in records)
        platform.clear_recompute_session("kept")
        assert all(record.outputs[0].tensor is None for record in records)


def test_two_sessions_each_replay_the_block(program, value_and_grads, assert_same):
    plain = program.plain(value_and_grads)
    with recording():
        out = program.forward()
        with platform.recompute_session_ctx("a", retain_on_unpack=True):
            first = backward(out, [program.x, program.w], keep_graph=True)
        with platform.recompute_session_ctx("b", retain_on_unpack=True):
            second = backward(out, [program.x, program.w], keep_graph=True)
        assert program.runs == ["block", "region", "region", "block", "block"]
        platform.clear_recompute_session("a")
        with platform.recompute_session_ctx("b", retain_on_unpack=True):
            third = backward(out, [program.x, program.w])
        platform.clear_recompute_session("b")
    for grads in (first, second, third):
        assert_same([out.asnumpy(), *grads], plain)
    assert program.runs == ["block", "region", "region", "block", "block"]


def test_a_second_backward_over_a_kept_graph_runs_the_regions_again_and_warns_once(
    program, value_and_grads, assert_same
):
    plain = program.plain(value_and_grads)
    with recording():
        out = program.forward()
        first = backward(out, [program.x, program.w], keep_graph=True)
        with pytest.warns(UserWarning, match="product' runs again") as caught:
            second = backward(out, [program.x, program.w], keep_graph=True)
            third = backward(out, [program.x, program.w])
    assert len(caught) == 1
    for grads in (first, second, third):
        assert_same([out.asnumpy(), *grads], plain)
    assert program.runs == ["block", "region", "region"] + ["block"] + ["block", "region", "region"] * 2


def test_backward_from_one_output_after_the_other(leaf, value_and_grads, assert_same):
    x, y = leaf(4, 4), leaf(4, 4)

    def block(a, b, inner):
        h = inner(ops.tanh(a), b)
        return ops.square(h), ops.exp(inner(ops.tanh(b), h))

    def run(call, inner):
        with recording():
            one, two = call(block, x, y, inner)
            grads = backward(one, [x, y], keep_graph=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return grads + backward(two, [x, y])

    region = checkpoint_exclude_wrapper(mint.matmul)
    assert_same(run(checkpoint, region), run(lambda fn, *args: fn(*args), mint.matmul))


def test_only_some_outputs_reach_the_loss(leaf, value_and_grads, assert_same):
    x, y = leaf(4, 4), leaf(4, 4)
    runs = []

    def late(a):
        runs.append(1)
        return ops.exp(a)

    def block(a, b, inner, other):
        used = ops.square(inner(ops.tanh(a), b))
        return used, ops.sigmoid(other(ops.tanh(b) * a))

    plain = value_and_grads(lambda: block(x, y, mint.matmul, late)[0].sum(), (), [x, y])
    runs.clear()
    region, unused = checkpoint_exclude_wrapper(mint.matmul), checkpoint_exclude_wrapper(late)
    assert_same(value_and_grads(lambda: checkpoint(block, x, y, region, unused)[0].sum(), (), [x, y]), plain)
    assert len(runs) == 1


@pytest.mark.parametrize("where", ["inner", "outer", "both"])
@pytest.mark.parametrize("prefire", [False, True])
def test_nested_checkpoints(leaf, value_and_grads, assert_same, where, prefire):
    x, w = leaf(4, 4), leaf(4, 4)
    runs = []

    def product(a, b):
        runs.append(1)
        return mint.matmul(a, b)

    excluded = checkpoint_exclude_wrapper(product)

    def run(call, inner_region, outer_region):
        def inner(a, b):
            return ops.tanh(inner_region(ops.sigmoid(a), b))

        def outer(a, b):
            h = call(inner, outer_region(ops.tanh(a), b), b)
            return ops.square(call(inner, h * 2, b) + outer_region(ops.exp(h), b))

        with recording(), platform.recompute_handle_collector_ctx() as handles:
            out = call(outer, x, w)
            if not prefire or call is not checkpoint:
                return [out.asnumpy(), *backward(out, [x, w])]
            with platform.recompute_session_ctx("nested", retain_on_unpack=True):
                for handle in list(handles):
                    platform.recompute_handle(handle, "nested")
                dx = backward(out, [x], keep_graph=True)
            with platform.recompute_session_ctx("nested"):
                found = [out.asnumpy(), *dx, *backward(out, [w])]
            platform.clear_recompute_session("nested")
            return found

    plain = run(lambda fn, *args: fn(*args), product, product)
    runs.clear()
    inside = excluded if where in ("inner", "both") else mint.matmul
    outside = excluded if where in ("outer", "both") else mint.matmul
    assert_same(run(checkpoint, inside, outside), plain)
    assert len(runs) == {"inner": 2, "outer": 2, "both": 4}[where]


def test_a_checkpoint_inside_an_excluded_region(leaf, value_and_grads, assert_same):
    x, w = leaf(4, 4), leaf(4, 4)
    runs = []

    def product(a, b):
        runs.append("product")
        return mint.matmul(a, b)

    excluded = checkpoint_exclude_wrapper(product)

    def run(call, region, wrap):
        def inner(a, b):
            runs.append("inner")
            return ops.exp(region(ops.tanh(a), b))

        outer_region = wrap(lambda a, b: ops.square(call(inner, a, b)))
        return value_and_grads(
            lambda: call(lambda a, b: (outer_region(ops.sigmoid(a), b) * ops.tanh(b)).sum(), x, w), (), [x, w]
        )

    plain = run(lambda fn, *args: fn(*args), product, lambda fn: fn)
    runs.clear()
    assert_same(run(checkpoint, excluded, checkpoint_exclude_wrapper), plain)
    assert runs == ["inner", "product", "inner"]


def test_replay_on_one_thread_and_backward_on_another(leaf, value_and_grads, assert_same):
    steps = [Program(leaf(4, 6), leaf(6, 6)) for _ in range(3)]
    plain = [program.plain(value_and_grads) for program in steps]
    outs, handles, found, errors = [], [], [None] * 3, []
    with recording():
        for program in steps:
            with platform.recompute_handle_collector_ctx() as collected:
                outs.append(program.forward())
            handles.append(collected)

    def on_a_thread(work, *args):
        def guarded():
            try:
                # MindSpore's executor bears one thread at a time; which of them comes first is left open.
                with one_thread:
                    work(*args)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def replay(index):
        with recording(), platform.recompute_session_ctx(index, retain_on_unpack=True):
            for handle in handles[index]:
                platform.recompute_handle(handle, index)

    def finish(index):
        with recording(), platform.recompute_session_ctx(index):
            found[index] = backward(outs[index], [steps[index].x, steps[index].w])

    for work in (replay, finish):
        for thread in [on_a_thread(work, index) for index in (2, 0, 1)]:
            thread.join(60)
            assert not thread.is_alive()
    assert not errors
    for index in range(3):
        platform.clear_recompute_session(index)
        assert_same([outs[index].asnumpy(), *found[index]], plain[index])
        assert steps[index].runs == ["block", "region", "region", "block"]


def test_nothing_is_held_after_the_graph_is_gone(program):
    from hyper_parallel.platform.mindspore.activation_checkpoint.input_handle import InputHandle
    from hyper_parallel.platform.mindspore.recompute import BlockHandle

    def handles_alive():
        gc.collect()
        return {id(found) for found in gc.get_objects() if type(found) in (InputHandle, BlockHandle)}

    before = handles_alive()
    with recording():
        with platform.recompute_handle_collector_ctx() as handles:
            out = program.forward()
        with platform.recompute_session_ctx("gone", retain_on_unpack=True):
            backward(out, [program.x], keep_graph=True)
    platform.clear_recompute_session("gone")
    handle = handles.pop()
    assert not any(len(kept) for kept in handle.recomputed_data.values())
    del out, handle
    assert handles_alive() <= before


def test_an_error_in_the_replay_that_makes_an_inner_blocks_input_leaves_no_tensor(leaf):
    x = leaf(4, 4)
    region = checkpoint_exclude_wrapper(lambda a: checkpoint(ops.exp, a))

    def block(a):
        if is_recomputing():
            raise KeyError("mine")
        return region(ops.tanh(a))

    def step():
        with recording():
            out = checkpoint(block, x)
            with pytest.raises(KeyError, match="mine"):
                backward(out, [x])

    step()
    before = live_tensor_count()
    for _ in range(5):
        step()
    assert live_tensor_count() == before
