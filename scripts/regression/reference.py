"""The same model in one process with MindSpore alone: no stages, no chunks, no recompute."""

from __future__ import annotations

import time
from typing import NamedTuple

import mindspore as ms
import numpy as np

from scripts.regression.cases import Case
from scripts.regression.models import Stage, data


class Reference(NamedTuple):
    """What a step gives.

    Attributes:
        loss: the mean over the micro-batches.
        gradients: of that mean, by parameter name.
        seconds: the time of a step.
    """

    loss: float
    gradients: dict[str, np.ndarray]
    seconds: float


class References:
    """The reference of each case of a job. Cases with the same model share one."""

    def __init__(self) -> None:
        self._known: dict[Case, Reference] = {}

    def of(self, case: Case, stages: int) -> Reference:
        """The reference of a case whose plan has `stages` stages."""
        plain = Case("", case.ranks, stages, "none", "none", "", case.model)
        if plain not in self._known:
            self._known[plain] = _run(plain, stages)
        return self._known[plain]


def _run(case: Case, stages: int) -> Reference:
    pieces = [Stage(case, index, stages) for index in range(stages)]
    weights = ms.ParameterTuple([weight for piece in pieces for weight in piece.trainable_params()])
    x, target = data(case)

    def loss_of(x: ms.Tensor, target: ms.Tensor) -> ms.Tensor:
        for piece in pieces[:-1]:
            x = piece(x)
        return pieces[-1](x, target)

    step = ms.value_and_grad(loss_of, None, weights)
    losses, total = [], [0.0] * len(weights)
    step(x[:1], target[:1])  # the first run is slower
    start = time.perf_counter()
    results = [step(x[k : k + 1], target[k : k + 1]) for k in range(case.micro_batches)]
    seconds = time.perf_counter() - start
    for loss, gradients in results:
        losses.append(float(loss))
        total = [sum_ + gradient.asnumpy().astype(np.float64) for sum_, gradient in zip(total, gradients)]
    found = {weight.name: sum_ / case.micro_batches for weight, sum_ in zip(weights, total)}
    return Reference(sum(losses) / len(losses), found, seconds)
