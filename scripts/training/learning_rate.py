"""The learning rate over the steps. It does not depend on how many steps there will be, so a job can be prolonged."""

from __future__ import annotations

from mindspore import Tensor, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

__all__ = ["WarmUpThenInverseSquareRoot"]


class WarmUpThenInverseSquareRoot(LearningRateSchedule):
    """Rise linearly to ``highest`` over ``warm_up`` steps, then fall as one over the square root of the step."""

    def __init__(self, highest: float, warm_up: int = 20) -> None:
        super().__init__()
        self.highest, self.warm_up = highest, warm_up

    def construct(self, global_step: Tensor) -> Tensor:
        """Return the rate of a step, counted from 0."""
        step = (global_step + 1).astype("float32") / self.warm_up
        return self.highest * ops.minimum(step, ops.rsqrt(step))
