"""Parameters that several stages hold together, as an embedding and the head that is tied to it.

Each stage has its own copy. The copies start equal (the first holder's values), each stage's backward adds to its own
copy's gradient, and before the optimizer step every copy gets the sum. So equal optimizers keep the copies equal. The
sum is made by the first holder, in the order of the stages, so that all copies get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel.platform.mindspore import autograd
from pipeline.execution.stage import PipelineStage
from pipeline.execution.transport import Transport


class SharedParameterInfo(NamedTuple):
    """One parameter that several stages hold.

    Args:
        parameter_names: for each stage that holds it, the name of its copy in that stage's Cell.
    """

    parameter_names: Mapping[int, str]

    @property
    def stages(self) -> list[int]:
        """The holders, ascending; the first one's values are the start."""
        return sorted(self.parameter_names)


class SharedParameters:
    """The shared parameters of a pipeline, as one rank sees them. All ranks must give the same list.

    Args:
        shared: the shared parameters.
        stages: the stages of this rank.
        rank: the world rank of this process.
        rank_of: the world rank that holds a stage.
        transport: how to reach the other holders.

    Raises:
        ValueError: a stage of this rank has no parameter of the name given.
    """

    def __init__(
        self,
        shared: Sequence[SharedParameterInfo],
        stages: Sequence[PipelineStage],
        rank: int,
        rank_of: Callable[[int], int],
        transport: Transport,
    ) -> None:
        self._shared = shared
        self._rank = rank
        self._rank_of = rank_of
        self._transport = transport
        local = {stage.stage_index: stage for stage in stages}
        self._copies: dict[tuple[int, int], Parameter] = {
            (number, index): _find(local[index], name)
            for number, info in enumerate(shared)
            for index, name in info.parameter_names.items()
            if index in local
        }

    def broadcast(self) -> None:
        """Give every copy the first holder's values."""
        for number, info in enumerate(self._shared):
            first, *others = info.stages
            source = self._copies.get((number, first))
            for stage in others:
                values = self._pass_on(source, first, stage)
                if values is not None:
                    self._copies[number, stage].set_data(values)
        self._transport.flush()

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        for number, info in enumerate(self._shared):
            first, *others = info.stages
            total = self._gradient(number, first)
            for stage in others:
                part = self._pass_on(self._gradient(number, stage), stage, first)
                if part is not None:
                    total = total + part
            if total is not None:
                self._set_gradient(number, first, total)
            for stage in others:
                result = self._pass_on(total, first, stage)
                if result is not None:
                    self._set_gradient(number, stage, result)
        self._transport.flush()

    def _pass_on(self, value: Tensor | None, source: int, target: int) -> Tensor | None:
        """Bring a value from one stage to another. Returns it on the target's rank, None on every other."""
        source_rank, target_rank = self._rank_of(source), self._rank_of(target)
        if source_rank == target_rank:
            return value
        if self._rank == source_rank:
            self._transport.send_value(target_rank, value)
        return self._transport.receive_value(source_rank) if self._rank == target_rank else None

    def _gradient(self, number: int, stage: int) -> Tensor | None:
        copy = self._copies.get((number, stage))
        if copy is None:
            return None
        gradient = autograd.gradient_of(copy)
        return ops.zeros_like(copy) if gradient is None else gradient

    def _set_gradient(self, number: int, stage: int, gradient: Tensor) -> None:
        copy = self._copies[number, stage]
        autograd.clear_gradient(copy)
        autograd.add_gradient(copy, gradient)


def _find(stage: PipelineStage, name: str) -> Parameter:
    module = stage.submodule
    found = dict(module.parameters_and_names()) if isinstance(module, nn.Cell) else {}
    if name not in found:
        raise ValueError(
            f"Expected a parameter {name!r} to share in stage {stage.stage_index}, it has {', '.join(found) or 'none'}."
        )
    return found[name]
