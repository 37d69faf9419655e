"""Compares a wrapped program with the plain one: values, gradients, executions, random state, what is left behind."""

from __future__ import annotations

import gc
import random
import warnings

from hyper_parallel.platform.mindspore.memory import live_tensor_count
from scripts.fuzzing.programs import Call, Program, random_program
from scripts.fuzzing.run import Model, Outcome, Planted


class Mismatch(AssertionError):
    """The wrapped program differs from the plain one."""


def check(program: Program) -> None:
    """Raise `Mismatch` where the wrapped program differs from the plain one, or leaves a Tensor behind."""
    left = _tensors_left(program)
    # What is made once per process is no leak: only what is left behind again counts.
    if left and (again := _tensors_left(program)):
        raise Mismatch(f"{left} Tensor objects are left behind, and {again} the next time")


def _tensors_left(program: Program) -> int:
    """Compare the wrapped program with the plain one, and return how many Tensor objects stay behind."""
    expected = Model(program, wrapped=False).step()
    before = live_tensor_count()
    wrapped = Model(program, wrapped=True)
    with warnings.catch_warnings():
        # A region that runs again over a kept graph warns, as it should.
        warnings.simplefilter("ignore")
        for step in range(program.steps):
            _compare(program, f"step {step}", expected, wrapped.step(), first=step == 0)
        if program.fault is not None:
            _fail_once(program, wrapped)
            _compare(program, "the step after a failed one", expected, wrapped.step())
    del wrapped
    return live_tensor_count() - before


def check_seed(seed: int) -> None:
    """Draw the program of this seed and check it."""
    check(random_program(random.Random(seed)))


def forget_what_exists() -> None:
    """Keep the objects that exist now out of later collections and counts, which makes both fast."""
    gc.collect()
    gc.freeze()


def _fail_once(program: Program, wrapped: Model) -> None:
    try:
        wrapped.step(program.fault)
    except Planted:
        return
    except Exception as error:
        raise Mismatch(f"the error raised in a body was replaced by {type(error).__name__}: {error}") from error


def _compare(program: Program, where: str, expected: Outcome, seen: Outcome, first: bool = False) -> None:
    for field in ("outputs", "gradients"):
        for number, (ours, theirs) in enumerate(zip(getattr(seen, field), getattr(expected, field))):
            different = [index for index, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]]
            if different or len(ours) != len(theirs):
                raise Mismatch(f"{where}: {field} {different} of micro-batch {number} differ from the plain program's")
    if seen.random_state != expected.random_state:
        raise Mismatch(f"{where}: the random state after the step differs from the plain program's")
    again = _replays_that_find_records_released(program)
    passes = 1 if program.session in ("shared", "prefired") else len(program.passes)
    if first:
        # A replay that misses the output of an `auto` region starts over, once for each such region.
        passes *= 1 + sum(body.save_output == "auto" for body in program.bodies)
    for index, body in enumerate(program.bodies):
        once, depth = expected.executions[index], _block_depth(program, index)
        most = {"main": once, "region": once * (1 + depth * again), "block": once * (1 + depth * passes)}[body.role]
        if not once <= seen.executions[index] <= most:
            raise Mismatch(
                f"{where}: {body.role} {index} ran {seen.executions[index]} times, expected {once} to {most} times"
            )


def _replays_that_find_records_released(program: Program) -> int:
    """Rule 7: without a session, or with a new one for every pass, each pass but the first runs regions again."""
    return len(program.passes) - 1 if program.session in ("none", "each") else 0


def _block_depth(program: Program, index: int) -> int:
    """How many checkpointed blocks lie around a body at most, itself included."""
    callers = [
        caller
        for caller, body in enumerate(program.bodies)
        if any(isinstance(step, Call) and step.body == index for step in body.steps)
    ]
    own = int(program.bodies[index].role == "block")
    return own + max((_block_depth(program, caller) for caller in callers), default=0)
