"""A block that takes time and does nothing: its forward, dx and dw sleep. So many ranks can be timed on few cores.

The waits are calibrated: each takes the time that is asked for, the lateness of a sleep included. A forward or replay
stands for the block's compute as a whole, so its few operators count as part of the time; what is measured beside it
is the chunk, the executor and the messages.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from hyper_parallel.platform.mindspore.autograd import Function
from scripts.bench.calibrated_wait import wait_until


class _WaitForward(Function):
    """Sleeps in the forward and in dx. What it saves makes a replay necessary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, end: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        wait_until(end)  # before the operator: a replay that has saved what is needed stops at the next one
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        _ = ctx.saved_tensors  # first: it may be replayed here
        wait_until(time.perf_counter() + ctx.seconds)
        return gradient, None, None


class _WaitWeight(Function):
    """Sleeps in dw."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = seconds
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        _ = ctx.saved_tensors  # first: it may be replayed here
        wait_until(time.perf_counter() + ctx.seconds)
        return gradient, None


class WaitBlock(nn.Cell):
    """Counts its executions.

    Args:
        name: of its one weight.
        seconds: that the forward, dx and dw take, each.
    """

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(auto_prefix=False)
        self.weight = Parameter(Tensor(np.zeros(1, np.float32)), name=name)
        self.seconds = seconds
        self.runs = 0
        self._operators: deque[float] = deque([0.0], maxlen=9)

    def construct(self, x: Tensor) -> Tensor:
        """Map a tensor of any shape to the same one."""
        self.runs += 1
        end = time.perf_counter() + self.seconds - statistics.median(self._operators)
        result = _WaitForward.apply(x, self.seconds, end) + _WaitWeight.apply(self.weight, self.seconds)
        self._operators.append(time.perf_counter() - end)
        return result
