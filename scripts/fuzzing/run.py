"""Runs a random program on MindSpore, plainly or wrapped, and reports everything that the two must agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel.core.activation_checkpoint import checkpoint_exclude_wrapper, checkpoint_wrapper
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore.autograd import Function, node_of, recording, run_backward
from scripts.fuzzing.programs import Body, Call, Fault, Op, Program, build, flatten


class Planted(Exception):
    """The error that a fault raises inside a body."""


# Operators ----------------------------------------------------------------------------------------------------------
class _CustomScale(Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return mint.mul(value, 0.75)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return mint.mul(grad, 0.75)


class _CustomSquare(Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return mint.mul(value, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return mint.mul(mint.mul(grad, value), 2.0)


class _CustomSame(Function):
    """Gives back its input, sharing the storage."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return mint.mul(grad, 1.5)


def _square_shaped(value: Tensor) -> Tensor:
    return value if value.shape[-1] == 4 else mint.reshape(value, (4, 4))


def _like(value: Tensor, other: Tensor) -> Tensor:
    return value if value.shape == other.shape else mint.reshape(value, other.shape)


def _mask(value: Tensor) -> Tensor:
    """Multiply by a mask made from the state of the generator, and move the generator on."""
    state = mindspore.get_rng_state()
    digest = hashlib.sha256(state.asnumpy().tobytes()).digest()
    moved = np.frombuffer(digest[:8], np.uint8)
    mindspore.set_rng_state(Tensor(np.concatenate((moved, np.zeros(8, np.uint8)))))
    bits = np.array([byte % 2 for byte in digest[16:32]], np.float32)
    return mint.mul(value, Tensor(bits.reshape(value.shape)))


def _slice(value: Tensor) -> tuple[Tensor]:
    flat = mint.reshape(value, (16,))
    return mint.cat((flat, flat), 0)[8:24]


def _split(left: Tensor, right: Tensor) -> Sequence[Tensor]:
    joined = mint.cat((mint.reshape(left, (4, 4)), mint.reshape(right, (4, 4))), 1)
    return mint.split(joined, 4, dim=1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "tanh": mint.tanh,
    "sin": mint.sin,
    "square": lambda value: mint.square(mint.tanh(value)),
    "scale": lambda value: mint.mul(value, 0.5),
    "softmax": lambda value: ops.softmax(value, -1),
    "stop": ops.stop_gradient,
    "custom_scale": _CustomScale.apply,
    "custom_square": _CustomSquare.apply,
    "custom_same": _CustomSame.apply,
    "add": lambda left, right: mint.add(left, _like(right, left)),
    "sub": lambda left, right: mint.sub(left, _like(right, left)),
    "mul": lambda left, right: mint.mul(left, _like(right, left)),
    "matmul": lambda value, weight: mint.matmul(_square_shaped(value), weight),
    "multiply": lambda value, weight: mint.mul(mint.reshape(value, (4, 4)), weight),
    "flatten": lambda value: mint.reshape(value, (16,)),
    "fold": lambda value: mint.reshape(value, (2, 2, 4)),
    "transpose": lambda value: mint.transpose(mint.reshape(value, (4, 4)), 0, 1),
    "slice": _slice,
    "split": _split,
    "mask": _mask,
}


class _BodyCell(nn.Cell):
    """A body as a Cell."""

    def __init__(self, body: Callable) -> None:
        super().__init__(auto_prefix=False)
        self._body = body

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self._body(*args, **kwargs)


# One model ----------------------------------------------------------------------------------------------------------
class Outcome(NamedTuple):
    """What one step of a program made. Arrays of bytes compare bitwise, also where a value is NaN."""

    outputs: list[list[bytes]]
    gradients: list[list[bytes | None]]
    random_state: bytes
    executions: list[int]


class Model:
    """The bodies of a program as callables, with weights. `wrapped` puts the wrappers around blocks and regions."""

    def __init__(self, program: Program, wrapped: bool) -> None:
        values = np.random.default_rng(0)
        self.program = program
        self.weights = [
            Parameter(
                Tensor(values.standard_normal((4, 4)).astype(np.float32)), name=f"weight{index}", requires_grad=trained
            )
            for index, trained in enumerate(program.weights)
        ]
        self.executions = [0] * len(program.bodies)
        self.fault: Fault | None = None
        self.callables = [self._callable(index, body, wrapped) for index, body in enumerate(program.bodies)]

    def _callable(self, index: int, body: Body, wrapped: bool) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._execute(index, args, kwargs)

        target = _BodyCell(run) if body.as_cell else run
        if wrapped and body.role == "block":
            return checkpoint_wrapper(target)
        if wrapped and body.role == "region":
            return checkpoint_exclude_wrapper(target, save_output=body.save_output)
        return target

    def _execute(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        body = self.program.bodies[index]
        self.executions[index] += 1
        raise_before = None
        if self.fault is not None and (index, self.executions[index]) == self.fault[:2]:
            raise_before = self.fault.step
        values = [leaf for structure, arg in zip(body.positional, args) for leaf in flatten(structure, arg)]
        for position, structure in enumerate(body.keywords):
            values.extend(flatten(structure, kwargs[f"option{position}"]))
        for position, step in enumerate(body.steps):
            if position == raise_before:
                raise Planted
            values.extend(self._call(step, values) if isinstance(step, Call) else self._operate(step, values))
        if raise_before == len(body.steps):
            raise Planted
        return build(body.result, iter([values[output] for output in body.outputs]))

    def _call(self, step: Call, values: list[Tensor]) -> list[Tensor]:
        body = self.program.bodies[step.body]
        leaves = iter([values[operand] for operand in step.operands])
        args = [build(structure, leaves) for structure in body.positional]
        kwargs = {f"option{position}": build(structure, leaves) for position, structure in enumerate(body.keywords)}
        return flatten(body.result, self.callables[step.body](*args, **kwargs))

    def _operate(self, step: Op, values: list[Tensor]) -> list[Tensor]:
        operands = [values[operand] for operand in step.operands]
        if step.weight is not None:
            operands.append(self.weights[step.weight])
        made = OPERATORS[step.name](*operands)
        return list(made) if isinstance(made, (tuple, list)) else [made]

    # One step -------------------------------------------------------------------------------------------------------
    def step(self, fault: Fault | None = None) -> Outcome:
        """Run forward and all backward passes for every micro-batch. `fault` may make it raise `Planted`."""
        self.executions = [0] * len(self.program.bodies)
        self.fault = fault
        mindspore.manual_seed(7)
        platform = get_platform()
        with recording():
            forwards = [self._forward(platform, number) for number in sorted(self.program.micro_batches)]
            after_forward = _random_state()
            results = {}
            try:
                for number in self.program.micro_batches:
                    inputs, outputs, handles = forwards[number]
                    results[number] = self._backward(platform, number, inputs, outputs, handles)
            finally:
                for number in self.program.micro_batches:
                    platform.clear_recompute_session(("step", number))
                assert _random_state() == after_forward, "the caller's random state was changed by a backward"
        return Outcome(
            outputs=[[_bytes(output) for output in forward[1]] for forward in forwards],
            gradients=[results[number] for number in sorted(results)],
            random_state=after_forward,
            executions=list(self.executions),
        )

    def _forward(self, platform: Any, number: int) -> tuple[list[Tensor], list[Tensor], list[Any]]:
        values = np.random.default_rng(number + 1)
        inputs = []
        for needs_grad in self.program.inputs:
            inputs.append(Tensor(values.standard_normal((4, 4)).astype(np.float32)))
            if needs_grad:
                inputs[-1].requires_grad_()
        with platform.recompute_handle_collector_ctx() as handles:
            outputs = self.callables[-1](*inputs)
        return inputs, list(outputs), list(handles)

    def _backward(
        self, platform: Any, number: int, inputs: list[Tensor], outputs: list[Tensor], handles: list[Any]
    ) -> list[bytes | None]:
        gradients = []
        session = ("step", number)
        if self.program.session == "prefired":
            with platform.recompute_session_ctx(session, retain_on_unpack=True):
                for handle in handles:
                    platform.recompute_handle(handle, session)
        for position, backward in enumerate(self.program.passes):
            last = position == len(self.program.passes) - 1
            roots = [outputs[root] for root in backward.roots if node_of(outputs[root]) is not None]
            wanted = self._wanted(backward.wanted, inputs)
            scale = Tensor(np.float32(position + 1))
            seeds = [mint.mul(ops.ones_like(root), scale) for root in roots]
            if self.program.session == "none":
                made = run_backward(roots, seeds, wanted, keep_graph=not last)
            else:
                each = self.program.session == "each"
                with platform.recompute_session_ctx(session, retain_on_unpack=not (last or each)):
                    made = run_backward(roots, seeds, wanted, keep_graph=not last)
                if each or last:
                    platform.clear_recompute_session(session)
            gradients.extend(None if gradient is None else _bytes(gradient) for gradient in made)
        return gradients

    def _wanted(self, wanted: str, inputs: list[Tensor]) -> list[Tensor]:
        needing = [tensor for tensor, needs in zip(inputs, self.program.inputs) if needs]
        trained = [weight for weight, trains in zip(self.weights, self.program.weights) if trains]
        return {"all": needing + trained, "inputs": needing, "weights": trained}[wanted]


def _random_state() -> bytes:
    return mindspore.get_rng_state().asnumpy().tobytes()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.asnumpy().tobytes()
