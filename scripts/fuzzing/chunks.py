"""Drives random programs through chunks, in a random order of steps, on several threads, and compares with plain runs.

1. Each micro-batch takes its own random way: recompute (all blocks, the last ones, twice, never), whole or split
   backward, or a release in between. The steps of all micro-batches are shuffled.
2. Each step runs on a random thread. Some replays run at the same time as a step of another micro-batch.
3. The plain program runs the same forwards in the same order, and one backward of the engine for each micro-batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Optional

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import autograd
from hyper_parallel.platform.mindspore.memory import live_tensor_count
from pipeline.execution.chunk import Chunk
from pipeline.execution.retention import Retention
from scripts.fuzzing.check import Mismatch
from scripts.fuzzing.programs import Program, random_program
from scripts.fuzzing.run import Model

Grads = list[Optional[bytes]]


class Step(NamedTuple):
    """One step of one micro-batch, and the thread that it runs on; `beside`: at the same time as the next one."""

    micro_batch: int
    name: str
    argument: Any
    thread: int
    beside: bool


class Route(NamedTuple):
    """How a program is driven: the steps, and which outputs each micro-batch has a gradient for."""

    steps: tuple[Step, ...]
    given: tuple[tuple[bool, ...], ...]
    counted: bool


def random_route(draw: random.Random, outputs: int, uses_random_state: bool) -> Route:
    """Draw a way through the steps. Replays that use the process's random state run alone."""
    ways: list[list[tuple[str, Any]]] = []
    for _ in range(draw.randint(1, 3)):
        way: list[tuple[str, Any]] = [("forward", None)]
        way += [("recompute", draw.choice((None, 0, 1, 2))) for _ in range(draw.choice((0, 1, 1, 2)))]
        way += draw.choice(([("backward", None)], [("backward_input", None), ("backward_weight", None)]))
        if draw.random() < 0.1:
            way = [*way[: draw.randint(1, len(way) - 1)], ("release", None)]
        ways.append(way)
    turns = [number for number, way in enumerate(ways) for _ in way]
    draw.shuffle(turns)
    steps = []
    for position, number in enumerate(turns):
        name, argument = ways[number].pop(0)
        following = turns[position + 1] if position + 1 < len(turns) else number
        alone = uses_random_state or (steps and steps[-1].beside)
        beside = following != number and name == "recompute" and not alone and draw.random() < 0.5
        steps.append(Step(number, name, argument, draw.randrange(2), beside))
    given = tuple(tuple(draw.random() < 0.8 for _ in range(outputs)) for _ in ways)
    return Route(tuple(steps), given, draw.random() < 0.5)


def check_seed(seed: int) -> None:
    """Draw the program and the route of this seed, and raise `Mismatch` where the two runs differ."""
    draw = random.Random(seed)
    program = random_program(draw)
    names = {step.name for body in program.bodies for step in body.steps if hasattr(step, "name")}
    route = random_route(draw, len(program.main.outputs), "mask" in names)
    check(program, route)


def check(program: Program, route: Route) -> None:
    """Compare; what a program leaves behind the first time may be made once per process."""
    left = _tensors_left(program, route)
    if left and (again := _tensors_left(program, route)):
        raise Mismatch(f"{left} Tensor objects are left behind, and {again} the next time")


def _tensors_left(program: Program, route: Route) -> int:
    expected = Plain(Model(program, wrapped=False), route).run()
    before = live_tensor_count()
    driver = Chunked(Model(program, wrapped=True), route)
    seen = driver.run()
    for name in ("outputs", "random_state"):
        if getattr(seen, name) != getattr(expected, name):
            raise Mismatch(f"{name} differ from the plain program's")
    for name in ("input_grads", "weight_grads"):
        ours, theirs = getattr(seen, name), getattr(expected, name)
        if ours.keys() != theirs.keys() or not all(_same_sums(ours[number], theirs[number]) for number in theirs):
            raise Mismatch(f"{name} differ from the plain program's")
    _check_executions(program, seen.executions, expected.executions)
    del driver
    return live_tensor_count() - before


def _same_sums(ours: Grads, theirs: Grads) -> bool:
    """Bitwise the same, but for gradients that the engine added up in another order."""
    for one, other in zip(ours, theirs):
        if one == other:
            continue
        if one is None or other is None:
            return False
        seen, expected = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
        if not np.abs(seen - expected).max() <= 1e-6 * np.abs(expected).max():
            return False
    return len(ours) == len(theirs)


def _check_executions(program: Program, seen: list[int], expected: list[int]) -> None:
    """Without regions that find out by themselves and without nesting the counts are exact."""
    nested = any(body.role != "main" for body in program.bodies for step in body.steps if hasattr(step, "body"))
    for index, body in enumerate(program.bodies):
        once, most = expected[index], 2 * expected[index]
        if body.role == "main" or (body.role == "region" and not _inside_block_of_region(program)):
            most = once
        if (body.role == "block" and nested) or any(other.save_output == "auto" for other in program.bodies):
            continue
        if not once <= seen[index] <= most:
            raise Mismatch(f"{body.role} {index} ran {seen[index]} times, expected {once} to {most}")


def _inside_block_of_region(program: Program) -> bool:
    """Whether a region calls a block: what that block's replay runs is its own affair."""
    called = [
        step.body for body in program.bodies if body.role == "region" for step in body.steps if hasattr(step, "body")
    ]
    return any(program.bodies[body].role == "block" for body in called)


class Result(NamedTuple):
    """What one run made, per micro-batch; bytes compare bitwise, also where a value is NaN."""

    outputs: dict[int, list[bytes]]
    input_grads: dict[int, Grads]
    weight_grads: dict[int, Grads]
    random_state: bytes
    executions: list[int]


class _Driver:
    """One model through one route."""

    def __init__(self, model: Model, route: Route) -> None:
        self.model, self.route = model, route
        self.outputs: dict[int, list[bytes]] = {}
        self.input_grads: dict[int, Grads] = {}
        self.weight_grads: dict[int, Grads] = {}

    def _inputs(self, number: int) -> list[Tensor]:
        values = np.random.default_rng(number + 1)
        inputs = [Tensor(values.standard_normal((4, 4)).astype(np.float32)) for _ in self.model.program.inputs]
        for tensor, needs_grad in zip(inputs, self.model.program.inputs):
            if needs_grad:
                tensor.requires_grad_()
        return inputs

    def _grads(self, number: int, outputs: list[Tensor]) -> tuple[Tensor | None, ...]:
        pairs = zip(outputs, self.route.given[number])
        scale = Tensor(np.float32(number + 1))
        return tuple(mint.mul(ops.ones_like(output), scale) if given else None for output, given in pairs)

    def _result(self) -> Result:
        state = mindspore.get_rng_state().asnumpy().tobytes()
        return Result(self.outputs, self.input_grads, self.weight_grads, state, list(self.model.executions))


class Plain(_Driver):
    """Forward, and one engine run, for each micro-batch."""

    def run(self) -> Result:
        mindspore.manual_seed(7)
        for step in self.route.steps:
            if step.name == "forward":
                self._forward_and_backward(step.micro_batch)
        names = {(step.micro_batch, step.name) for step in self.route.steps}
        for number in self.outputs:
            if not {(number, "backward"), (number, "backward_input")} & names:
                del self.input_grads[number]
            if not {(number, "backward"), (number, "backward_weight")} & names:
                del self.weight_grads[number]
        return self._result()

    def _forward_and_backward(self, number: int) -> None:
        inputs = self._inputs(number)
        with autograd.recording():
            outputs = list(self.model.callables[-1](*inputs))
        self.outputs[number] = [_bytes(output) for output in outputs]
        pairs = [
            pair for pair in zip(outputs, self._grads(number, outputs)) if pair[1] is not None and _has_node(pair[0])
        ]
        roots, grads = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        needing = [tensor for tensor in inputs if autograd.requires_grad(tensor)]
        trained = [weight for weight in self.model.weights if autograd.requires_grad(weight)]
        made = autograd.run_backward(roots, grads, [*needing, *trained], keep_graph=False)
        found = dict(zip(map(id, [*needing, *trained]), made))
        self.input_grads[number] = [_bytes(found.get(id(tensor))) for tensor in inputs]
        self.weight_grads[number] = [_bytes(found.get(id(weight))) for weight in self.model.weights]


class Chunked(_Driver):
    """The steps of the route, each on its thread."""

    def run(self) -> Result:
        mindspore.manual_seed(7)
        retention = Retention() if self.route.counted else None
        count = len(self.route.given)
        self._chunks = [Chunk(0, number, self.model.weights, retention) for number in range(count)]
        self._output_grads: dict[int, Any] = {}
        running: list[Future] = []
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            for step in self.route.steps:
                running.append((first, second)[step.thread].submit(self._step, step))
                if not step.beside:
                    for future in running:
                        future.result()
                    running.clear()
        held = [chunk.held_bytes() for chunk in self._chunks]
        if any(held):
            raise Mismatch(f"released chunks hold {held} bytes")
        return self._result()

    def _step(self, step: Step) -> None:
        number, chunk = step.micro_batch, self._chunks[step.micro_batch]
        run: dict[str, Callable] = {
            "forward": lambda: self._forward(chunk, number),
            "recompute": lambda: chunk.recompute(step.argument),
            "backward": lambda: self._backward(chunk.backward, number),
            "backward_input": lambda: self._backward(chunk.backward_input, number),
            "backward_weight": lambda: self._backward_weight(chunk, number),
            "release": chunk.release,
        }
        run[step.name]()

    def _forward(self, chunk: Chunk, number: int) -> None:
        outputs = list(chunk.forward(self.model.callables[-1], *self._inputs(number)))
        self.outputs[number] = [_bytes(output) for output in outputs]
        self._output_grads[number] = self._grads(number, outputs)

    def _backward(self, backward: Callable, number: int) -> None:
        grads = backward(self._output_grads.pop(number))
        self.input_grads[number] = [_bytes(grad) for grad in grads]
        if backward.__name__ == "backward":
            self._take_weight_grads(number)

    def _backward_weight(self, chunk: Chunk, number: int) -> None:
        chunk.backward_weight()
        self._take_weight_grads(number)

    def _take_weight_grads(self, number: int) -> None:
        self.weight_grads[number] = [_bytes(autograd.gradient_of(weight)) for weight in self.model.weights]
        for weight in self.model.weights:
            autograd.clear_gradient(weight)


def _has_node(tensor: Tensor) -> bool:
    return autograd.requires_grad(tensor) and autograd.node_of(tensor) is not None


def _bytes(tensor: Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.asnumpy().tobytes()
