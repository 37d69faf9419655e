"""Costs as a user writes them: on the command line, or in a JSON file with a number per stage.

    {"unit": "ms",
     "forward": [3.1, 2.8], "backward_input": [3.0, 2.9], "backward_weight": 2.5, "recompute": 3, "blocks": 4,
     "overlapped": null, "communication": {"latency": 0.1, "bandwidth": 20, "forward_size": 8, "backward_size": 8},
     "memory": {"activation": [4, 3], "checkpoint_input": 0.2, "excluded": 0, "pending_weight": 2}}

The names are those of `Costs` and `Memory`; f, b, w, r stand for the first four, and one number for `communication` is
its latency. What is left out has the default of the command line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.plan.action import PlanError
from pipeline.plan.costs import Communication, Costs, Memory, PerStage

_LETTERS = {"f": "forward", "b": "backward_input", "w": "backward_weight", "r": "recompute", "c": "communication"}
_MEMORY_LETTERS = {"a": "activation", "i": "checkpoint_input", "e": "excluded"}


@dataclass(frozen=True)
class CostModel:
    """What a user said about the stages.

    Args:
        costs: the times.
        memory: what chunks hold.
        stages: how many stages the figures are for; None if every figure is one number for all.
        unit: of the times; empty if not given.
    """

    costs: Costs
    memory: Memory
    stages: int | None = None
    unit: str = ""


def read_cost_text(text: str) -> CostModel:
    """Costs from `f=1,b=1,w=1,r=0,c=0` (these are the defaults), and a=1,i=0,e=0 for memory.

    Raises:
        PlanError: an unknown letter, or no number.
    """
    given: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        letter, _, number = item.partition("=")
        if letter.strip() not in {*_LETTERS, *_MEMORY_LETTERS}:
            raise PlanError(f"expected costs such as f=1,b=1,w=1,r=0,c=0 (memory: a=1,i=0,e=0), saw {item!r}")
        try:
            given[letter.strip()] = float(number)
        except ValueError:
            raise PlanError(f"expected a number after {letter.strip()}= in the costs, saw {number!r}") from None
    memory = {_MEMORY_LETTERS[letter]: given.pop(letter) for letter in _MEMORY_LETTERS if letter in given}
    return _model({**given, "memory": memory})


def read_cost_file(file: Path) -> CostModel:
    """Costs from a JSON file, see above.

    Raises:
        OSError: it cannot be opened.
        PlanError: it is no JSON, has an unknown name, or its lists differ in length.
    """
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise PlanError(f"expected JSON in {file.name}, saw text that is none ({error})") from None
    if not isinstance(content, dict):
        raise PlanError(f"expected an object with forward, backward_input, ... in {file.name}, saw {type(content)}")
    return _model(content)


def _model(content: Mapping[str, Any]) -> CostModel:
    content = {_LETTERS.get(name, name): value for name, value in content.items()}
    unit, memory = str(content.pop("unit", "")), content.pop("memory", {})
    communication = content.pop("communication", 0.0)
    if not isinstance(communication, Mapping):
        communication = {"latency": communication}
    costs = _build(Costs, content, "costs", communication=_build(Communication, communication, "communication"))
    model = CostModel(costs, _build(Memory, memory, "memory"), unit=unit)
    lengths = {len(value) for _, value in _figures(model) if isinstance(value, Sequence)}
    if len(lengths) > 1:
        raise PlanError(f"expected lists of one length (the number of stages), saw lengths {sorted(lengths)}")
    return dataclasses.replace(model, stages=lengths.pop() if lengths else None)


def _build(kind: type, values: Any, what: str, **more: Any) -> Any:
    names = [field.name for field in dataclasses.fields(kind) if field.name not in more]
    if not isinstance(values, Mapping) or not set(values) <= set(names):
        saw = ", ".join(sorted(set(values) - set(names))) if isinstance(values, Mapping) else repr(values)
        raise PlanError(f"expected only {', '.join(names)} in the {what}, saw {saw}")
    for name, value in values.items():
        for number in value if isinstance(value, list) else [value]:
            if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float)) or number < 0):
                raise PlanError(f"expected numbers from 0 up for {name} in the {what}, saw {number!r}")
    return kind(**values, **more)


def _figures(model: CostModel) -> list[tuple[str, Any]]:
    parts = (model.costs, model.costs.communication, model.memory)
    return [(field.name, getattr(part, field.name)) for part in parts for field in dataclasses.fields(part)]


def recut(model: CostModel, ranks: int, stages: int) -> CostModel:
    """The costs of the same model when it is cut into another number of stages.

    One number for all stages is that of a stage when there are as many stages as ranks. A stage is cut into equal
    parts, or consecutive stages are joined. Transfers are as long as before.

    Raises:
        PlanError: the number of stages is no multiple or divisor of the one that the costs are for.
    """
    have = model.stages or ranks
    if stages == have:
        return model
    if stages % have and have % stages:
        raise PlanError(f"expected a multiple or a divisor of {have} stages, which the costs are for, saw {stages}")

    def changed(value: PerStage | None) -> PerStage | None:
        if value is None:
            return None
        each = [value] * have if isinstance(value, (int, float)) else list(value)
        if stages > have:
            return [number * have / stages for number in each for _ in range(stages // have)]
        joined = have // stages
        return [sum(each[start : start + joined]) for start in range(0, have, joined)]

    def last_of_joined(value: PerStage) -> PerStage:
        if isinstance(value, (int, float)):
            return value
        if stages > have:
            return [number for number in value for _ in range(stages // have)]
        return list(value)[have // stages - 1 :: have // stages]

    def first_of_joined(value: PerStage) -> PerStage:
        if isinstance(value, (int, float)) or stages > have:
            return last_of_joined(value)
        return list(value)[:: have // stages]

    def every_figure(part: Any, **kept: Any) -> Any:
        names = [field.name for field in dataclasses.fields(part) if field.name not in kept]
        return dataclasses.replace(part, **{name: changed(getattr(part, name)) for name in names}, **kept)

    transfers = dataclasses.replace(
        model.costs.communication,
        forward_size=last_of_joined(model.costs.communication.forward_size),
        backward_size=first_of_joined(model.costs.communication.backward_size),
    )
    costs = every_figure(model.costs, communication=transfers)
    return CostModel(costs, every_figure(model.memory), stages, model.unit)
