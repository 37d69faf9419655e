"""One piece of the model in the pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.platform.mindspore import autograd


class PipelineStage:
    """A piece of the model and its place in the pipeline.

    The first stage takes the positional inputs of `run`. Every other stage takes what the stage before it returned: a
    tuple or list as positional inputs, a dict as keyword inputs, anything else as one positional input. A stage also
    takes the keyword inputs of `run` that its `construct` names. The last stage returns the loss of its micro-batch, or
    a tuple, list or dict with the loss as its first entry.

    Args:
        submodule: a Cell, or a function of tensors.
        stage_index: the place of this stage, 0 to stage_num - 1.
        stage_num: how many stages the pipeline has, over all ranks.
        weights: the parameters to train; by default the Cell's trainable ones.

    Raises:
        ValueError: the index is out of range.
    """

    def __init__(
        self,
        submodule: Union[nn.Cell, Callable],
        stage_index: int,
        stage_num: int,
        weights: Optional[Sequence[Parameter]] = None,
    ) -> None:
        if not 0 <= stage_index < stage_num:
            raise ValueError(
                f"Expected a stage index from 0 to {stage_num - 1}, got {stage_index}; stages are counted from 0."
            )
        self.submodule = submodule
        self.stage_index = stage_index
        self.stage_num = stage_num
        if weights is None:
            weights = submodule.trainable_params() if isinstance(submodule, nn.Cell) else ()
        self.weights: tuple[Parameter, ...] = tuple(weights)
        self._keywords, self._takes_all = _keywords_of(submodule)

    @property
    def is_first(self) -> bool:
        """Whether this stage takes the inputs of the model."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage returns the loss."""
        return self.stage_index == self.stage_num - 1

    def keywords(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those keyword inputs that this stage takes."""
        return {name: value for name, value in kwargs.items() if self._takes_all or name in self._keywords}

    def gradients(self) -> tuple[Tensor, ...]:
        """The gradients added up so far, one per weight, in the order of `weights`; zeros where none has come."""
        found = [autograd.gradient_of(weight) for weight in self.weights]
        return tuple(
            ops.zeros_like(weight) if gradient is None else gradient for weight, gradient in zip(self.weights, found)
        )

    def clear_gradients(self) -> None:
        """Forget the gradients added up so far."""
        for weight in self.weights:
            autograd.clear_gradient(weight)

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage_index} of {self.stage_num}, {type(self.submodule).__name__})"


def _keywords_of(submodule: Union[nn.Cell, Callable]) -> tuple[frozenset[str], bool]:
    """The names that a Cell's construct or a function takes, and whether it takes any name."""
    function = submodule.construct if isinstance(submodule, nn.Cell) else submodule
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        frozenset(parameter.name for parameter in parameters if parameter.kind in named),
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )
