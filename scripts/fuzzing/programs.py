"""Random programs made of checkpointed blocks and excluded regions, as plain data.

A program is a list of bodies. A body is a list of steps over a growing list of values: the body's inputs come first,
each step appends what it makes. A step is an operator or a call of another body, which is a checkpointed block or an
excluded region. So the same program can be run plainly and wrapped, and printed when the two differ.

Every value has 16 elements, in several shapes, so that any operator takes any value.
"""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Union

UNARY = ("tanh", "sin", "square", "scale", "softmax", "stop", "custom_scale", "custom_square", "custom_same")
BINARY = ("add", "sub", "mul")
WEIGHTED = ("matmul", "matmul", "multiply")
VIEWS = ("flatten", "fold", "transpose", "slice", "split")
RANDOM = ("mask",)
RESULTS = {"split": 2}
"""How many values an operator makes, where that is not one."""


# How arguments and results are nested --------------------------------------------------------------------------------
class Leaf(NamedTuple):
    """One tensor."""


class Constant(NamedTuple):
    """Something that is no tensor."""

    value: Any


class Nest(NamedTuple):
    """A container; `kind` is a key of CONTAINERS."""

    kind: str
    children: tuple[Any, ...]


Structure = Union[Leaf, Constant, Nest]
Pair = namedtuple("Pair", ["first", "second"])
CONTAINERS = {"tuple": tuple, "list": list, "dict": dict, "ordered": OrderedDict, "pair": Pair}


def leaf_count(structure: Structure) -> int:
    """How many tensors the structure holds."""
    if isinstance(structure, Nest):
        return sum(leaf_count(child) for child in structure.children)
    return int(isinstance(structure, Leaf))


def build(structure: Structure, values: Iterator[Any]) -> Any:
    """Nest the next values as the structure says."""
    if isinstance(structure, Leaf):
        return next(values)
    if isinstance(structure, Constant):
        return structure.value
    items = [build(child, values) for child in structure.children]
    if structure.kind == "pair":
        return Pair(*items)
    if structure.kind in ("dict", "ordered"):
        return CONTAINERS[structure.kind]((f"key{index}", item) for index, item in enumerate(items))
    return CONTAINERS[structure.kind](items)


def flatten(structure: Structure, nested: Any) -> list[Any]:
    """Return the tensors of a nest in order, and check that its types are those of the structure."""
    if isinstance(structure, Leaf):
        return [nested]
    if isinstance(structure, Constant):
        assert nested == structure.value, f"expected the constant {structure.value!r}, got {nested!r}"
        return []
    expected = CONTAINERS[structure.kind]
    assert type(nested) is expected, f"expected a {expected.__name__}, got a {type(nested).__name__}"
    items = list(nested.values()) if isinstance(nested, dict) else list(nested)
    assert len(items) == len(structure.children), f"expected {len(structure.children)} items, got {len(items)}"
    return [leaf for child, item in zip(structure.children, items) for leaf in flatten(child, item)]


# What a program consists of ------------------------------------------------------------------------------------------
class Op(NamedTuple):
    """One operator on values (by index), with a weight (by index) where it takes one."""

    name: str
    operands: tuple[int, ...]
    weight: int | None = None


class Call(NamedTuple):
    """A call of another body (by index) with values (by index)."""

    body: int
    operands: tuple[int, ...]


class Body(NamedTuple):
    """What a block or a region runs. `positional` and `keywords` say how its inputs are nested."""

    role: str
    positional: tuple[Structure, ...]
    keywords: tuple[Structure, ...]
    steps: tuple[Op | Call, ...]
    outputs: tuple[int, ...]
    result: Structure
    as_cell: bool = False
    save_output: bool | str = True


class Pass(NamedTuple):
    """One backward: from which of the program's outputs, and for which gradients."""

    roots: tuple[int, ...]
    wanted: str


class Fault(NamedTuple):
    """Raise in the n-th execution of a body, after some of its steps."""

    body: int
    execution: int
    step: int


class Program(NamedTuple):
    """Bodies (the last one is the main program), and how the step is run."""

    weights: tuple[bool, ...]
    inputs: tuple[bool, ...]
    bodies: tuple[Body, ...]
    passes: tuple[Pass, ...]
    session: str
    micro_batches: tuple[int, ...]
    steps: int
    fault: Fault | None

    @property
    def main(self) -> Body:
        """The body that is called once per micro-batch."""
        return self.bodies[-1]


SESSIONS = ("none", "none", "shared", "prefired", "each")
"""No session; one for all passes; the same, fired before the first pass; a new one for every pass."""


# How a program is drawn ----------------------------------------------------------------------------------------------
class _Author:
    """Draws bodies and keeps those that exist, so that a later body may call them again."""

    def __init__(self, draw: random.Random, weights: int) -> None:
        self.draw = draw
        self.weights = weights
        self.bodies: list[Body] = []

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def structure(self, depth: int = 0) -> Structure:
        if depth < 2 and self.chance(0.3):
            kind = self.draw.choice(sorted(CONTAINERS))
            count = 2 if kind == "pair" else self.draw.randint(1, 2)
            return Nest(kind, tuple(self.structure(depth + 1) for _ in range(count)))
        return Constant(self.draw.choice((None, 2.5, "word"))) if self.chance(0.1) else Leaf()

    def structures(self, low: int, high: int) -> tuple[Structure, ...]:
        return tuple(self.structure() for _ in range(self.draw.randint(low, high)))

    def operator(self, available: Sequence[int]) -> Op:
        group = self.draw.choice((UNARY, UNARY, BINARY, WEIGHTED, WEIGHTED, VIEWS, RANDOM))
        name = self.draw.choice(group)
        operands = tuple(self.draw.choice(available) for _ in range(2 if group is BINARY or name == "split" else 1))
        return Op(name, operands, self.draw.randrange(self.weights) if group is WEIGHTED else None)

    def body(self, role: str, depth: int) -> int:
        """Draw a body of this role and return its index. `depth` bounds how far calls nest."""
        positional, keywords = self.structures(1, 2), self.structures(0, 1)
        if not sum(map(leaf_count, positional + keywords)):
            positional = (*positional, Leaf())
        steps, usable = self.steps(role, sum(map(leaf_count, positional + keywords)), depth)
        result = Nest("tuple", self.structures(2, 3)) if self.chance(0.4) else self.structure()
        if not leaf_count(result):
            result = Leaf()
        outputs = tuple(self.output(usable) for _ in range(leaf_count(result)))
        save_output = "auto" if role == "region" and self.chance(0.3) else True
        return self.add(Body(role, positional, keywords, steps, outputs, result, self.chance(0.5), save_output))

    def add(self, body: Body) -> int:
        self.bodies.append(body)
        return len(self.bodies) - 1

    def output(self, usable: Sequence[int]) -> int:
        """Mostly a late value; now and then any, so also an input that comes back unchanged."""
        return self.draw.choice(usable) if self.chance(0.15) else self.draw.choice(usable[-3:])

    def steps(self, role: str, inputs: int, depth: int) -> tuple[tuple[Op | Call, ...], list[int]]:
        """Draw a body's steps; return them with the values that may be used, which all but those inside a chain may."""
        steps: list[Op | Call] = []
        usable, values = list(range(inputs)), inputs
        for _ in range(self.draw.randint(1, 4 if role == "region" else 5)):
            if role == "block" and depth and self.chance(0.1):
                chain = self.chain(self.draw.choice(usable), values)
                steps.extend(chain)
                values += len(chain)
                usable.append(values - 1)
                continue
            step = self.step(role, usable, depth)
            steps.append(step)
            made = len(self.bodies[step.body].outputs) if isinstance(step, Call) else RESULTS.get(step.name, 1)
            usable.extend(range(values, values + made))
            values += made
        return tuple(steps), usable

    def step(self, role: str, usable: Sequence[int], depth: int) -> Op | Call:
        call_probability = {"main": 0.7, "block": 0.5, "region": 0.1}[role]
        if depth == 0 or not self.chance(call_probability):
            return self.operator(usable)
        body = self.callee(role, depth)
        inputs = sum(map(leaf_count, self.bodies[body].positional + self.bodies[body].keywords))
        return Call(body, tuple(self.draw.choice(usable) for _ in range(inputs)))

    def callee(self, role: str, depth: int) -> int:
        """An old body now and then, so that one wrapper is called repeatedly; else a new one."""
        reusable = [index for index, body in enumerate(self.bodies) if body.save_output is not False]
        if depth > 1 and reusable and self.chance(0.25):
            return self.draw.choice(reusable)
        new_role = "block" if self.chance({"main": 0.85, "block": 0.25, "region": 0.4}[role]) else "region"
        return self.body(new_role, depth - 1)

    def chain(self, operand: int, values: int) -> list[Call]:
        """Regions whose output goes whole into the next one; only the last keeps its output."""
        calls = []
        for kept in (*(False for _ in range(self.draw.randint(1, 2))), True):
            steps, usable = self.steps("region", 1, 0)
            save_output = self.draw.choice((kept, "auto"))
            body = Body("region", (Leaf(),), (), steps, tuple(usable[-1:]), Leaf(), self.chance(0.5), save_output)
            calls.append(Call(self.add(body), (operand,)))
            operand = values + len(calls) - 1
        return calls


def random_program(draw: random.Random) -> Program:
    """Draw a program from a source of randomness (`random.Random`, or hypothesis's)."""
    weights = tuple(draw.random() < 0.7 for _ in range(draw.randint(1, 3)))
    inputs = tuple(draw.random() < 0.8 for _ in range(draw.randint(1, 3)))
    author = _Author(draw, len(weights))
    steps, usable = author.steps("main", len(inputs), depth=3)
    outputs = tuple(usable[len(inputs) :])
    result = Nest("tuple", tuple(Leaf() for _ in outputs))
    author.add(Body("main", tuple(Leaf() for _ in inputs), (), steps, outputs, result))
    micro_batches = list(range(draw.choice((1, 1, 2))))
    draw.shuffle(micro_batches)
    return Program(
        weights=weights,
        inputs=inputs,
        bodies=tuple(author.bodies),
        passes=tuple(_random_pass(draw, len(outputs)) for _ in range(draw.randint(1, 3))),
        session=draw.choice(SESSIONS),
        micro_batches=tuple(micro_batches),
        steps=draw.randint(1, 2),
        fault=_random_fault(draw, author.bodies) if draw.random() < 0.3 else None,
    )


def _random_pass(draw: random.Random, outputs: int) -> Pass:
    roots = tuple(index for index in range(outputs) if draw.random() < 0.5) or (outputs - 1,)
    return Pass(roots, draw.choice(("all", "all", "inputs", "weights")))


def _random_fault(draw: random.Random, bodies: Sequence[Body]) -> Fault:
    body = draw.randrange(len(bodies))
    return Fault(body, draw.randint(1, 4), draw.randint(0, len(bodies[body].steps)))
