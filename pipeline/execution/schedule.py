"""What a training script calls: a plan bound to the stages of a rank.

One step is `run`, once or several times (the gradients add up), then `gradients`, then the optimizer:

    schedule = Schedule1F1B(PipelineStage(cell, rank, ranks), micro_batch_num=8)
    optimizer = nn.AdamW(schedule.parameters(), learning_rate)
    for tokens, labels in data:
        losses = schedule.run(tokens, labels=labels)
        optimizer(schedule.gradients())

`gradients` returns on a rank only when every rank has its own: no optimizer step is applied on some ranks only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from mindspore import Parameter, Tensor

from hyper_parallel.platform.mindspore import communication
from pipeline.execution.executor import Executor, Hook, forward_only
from pipeline.execution.faults import PipelineError
from pipeline.execution.grid import RankGrid
from pipeline.execution.meeting import meet
from pipeline.execution.microbatch import BatchDimSpec, Inputs, split
from pipeline.execution.shared_parameters import SharedParameterInfo, SharedParameters
from pipeline.execution.stage import PipelineStage
from pipeline.execution.trace import TraceEvent
from pipeline.execution.transport import Transport
from pipeline.plan import Kind, Plan, insert_communication, validate

TRAINING, EVALUATION = 0, 1

Stages = Union[PipelineStage, Sequence[PipelineStage]]


class Schedule:
    """Runs a plan on the stages of this rank. Every rank of the job makes one, with the same plan.

    Args:
        plan: any valid plan; sends and receives are inserted if it has none.
        stages: the stages that the plan's placement gives to this rank.
        copies: how many copies of the pipeline work side by side, each on its own part of the batch. The job has
            `plan.ranks * copies` workers, arranged as `RankGrid` says.
        shared_parameters: the parameters that several stages hold.
        args_batch_dim: the batch dimension of each positional input; 0 where not given.
        kwargs_batch_dim: the batch dimension of keyword inputs by name; 0 where not given.
        loss_scale: factor on the loss, for 16-bit gradients; `gradients` takes it out again.
        timeout: seconds after which an action that is not done, or a rank that is silent, counts as hanging and ends
            the job. Also the longest time for all ranks to make their schedule.
        world: this worker's place in the job; by default the job is joined here.

    Raises:
        PlanError: the plan is not valid.
        PipelineError: the number of workers, the stages, the plan or the software of a rank are not what they should
            be.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Stages,
        *,
        copies: int = 1,
        shared_parameters: Sequence[SharedParameterInfo] = (),
        args_batch_dim: Optional[Sequence[BatchDimSpec]] = None,
        kwargs_batch_dim: Optional[Mapping[str, BatchDimSpec]] = None,
        loss_scale: float = 1.0,
        timeout: float = 300.0,
        world: Optional[communication.World] = None,
    ) -> None:
        self.world = world or communication.init()
        self.plan = validate(plan if plan.has_communication else insert_communication(plan))
        self.grid = RankGrid(plan.ranks, copies)
        self.stages = _sorted(stages)
        self.rank = self.grid.pipeline_rank(self.world.rank)
        self._batch_dims = (args_batch_dim, kwargs_batch_dim)
        self._loss_scale = loss_scale
        self._runs = 0
        plans = (self.plan, forward_only(self.plan))
        self._watch, self._monitor = meet(self.world, plans, self.grid, timeout, self._misplaced())
        self._transport = Transport(self.world, self._world_rank_of)
        self._executor, self._evaluator = (
            Executor(plan, self.rank, self.stages, self._transport, self._watch) for plan in plans
        )
        self._copies_group = self._make_copies_group()
        self._shared = SharedParameters(
            shared_parameters, self.stages, self.world.rank, self._world_rank_of, self._transport
        )
        self._shared.broadcast()

    @staticmethod
    def from_csv(file: Union[str, Path], stages: Stages, **options: Any) -> Schedule:
        """A schedule from a plan in a CSV file; options as for the class."""
        path = Path(file)
        return Schedule(Plan.from_csv(path.read_text(), name=path.name), stages, **options)

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the plan once: forward and backward of every micro-batch. Gradients add up until `gradients` takes them.

        Args:
            args: inputs of the first stage, cut into micro-batches; other ranks may leave them out.
            kwargs: inputs by name, cut into micro-batches, for the stages that take them.

        Returns:
            what the last stage returned for each micro-batch; an empty list on ranks that do not hold it.

        Raises:
            MicroBatchError: the batch cannot be cut.
            ActionError: an action failed.
        """
        with self._step(TRAINING):
            results = self._executor.run(self._micro_batches(args, kwargs), self._sensitivity())
        self._runs += 1
        return results

    def evaluate(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the forwards only, without gradients. Arguments and result as for `run`."""
        with self._step(EVALUATION):
            return self._evaluator.run(self._micro_batches(args, kwargs))

    def parameters(self) -> tuple[Parameter, ...]:
        """The weights of this rank's stages, in the order of `gradients`."""
        return tuple(weight for stage in self.stages for weight in stage.weights)

    def gradients(self) -> tuple[Tensor, ...]:
        """End the step: the gradients of this rank's weights for the mean loss over all that was run since the last
        call.

        Copies of shared parameters get their sum, and copies of the pipeline are summed up, once. Returns when all
        ranks have come here, and forgets the gradients.

        Raises:
            RuntimeError: nothing was run.
        """
        if not self._runs:
            raise RuntimeError("Expected at least one run before gradients, saw none; call run first.")
        self._watch.gather()
        self._shared.sum_gradients()
        found = tuple(gradient for stage in self.stages for gradient in stage.gradients())
        if self._copies_group:
            found = tuple(communication.all_reduce(self.world, gradient, self._copies_group) for gradient in found)
        factor = 1.0 / (self._loss_scale * self._runs)
        if factor != 1.0:
            found = tuple(gradient * factor for gradient in found)
        for stage in self.stages:
            stage.clear_gradients()
        self._runs = 0
        communication.barrier(self.world)
        self._watch.leave()
        return found

    def register(self, kind: Kind, hook: Optional[Hook]) -> None:
        """Call `hook(step, action)` for every action of a kind instead of running it; None takes it back.

        `step.run_default(action)` runs the action. An overlapped pair is one action of kind OVERLAP_F_B.
        """
        self._executor.register(Kind(kind), hook)

    @property
    def trace(self) -> list[TraceEvent]:
        """What this rank did in the last `run`."""
        return self._executor.trace.events

    def pending(self) -> int:
        """Messages that are under way or not yet used; 0 between steps."""
        return self._transport.pending()

    def close(self) -> None:
        """Stop the threads of this schedule. The last thing that every rank does with it."""
        self._watch.close()
        if self._monitor is not None:
            self._monitor.close()
        self._transport.close()

    def __enter__(self) -> Schedule:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()

    @contextlib.contextmanager
    def _step(self, plan: int) -> Iterator[None]:
        """Be watched while a plan runs. What raises outside of an action is told to the other ranks too."""
        self._watch.begin(plan)
        try:
            yield
        except PipelineError:
            raise
        except Exception as error:
            self._watch.decide(f"{type(error).__name__}: {error}")
            raise
        self._watch.leave()

    def _sensitivity(self) -> float:
        """The gradient of one micro-batch's loss in the mean over micro-batches and copies."""
        return self._loss_scale / (self.plan.micro_batches * self.grid.copies)

    def _micro_batches(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Inputs]:
        wanted = args if self.stages[0].is_first else ()
        named = {name: value for stage in self.stages for name, value in stage.keywords(kwargs).items()}
        return split(wanted, named, self.plan.micro_batches, *self._batch_dims)

    def _world_rank_of(self, stage: int) -> int:
        return self.grid.world_rank(self.plan.placement.rank_of(stage), self.grid.copy_of(self.world.rank))

    def _misplaced(self) -> str:
        """Why this rank cannot run its row, or nothing."""
        expected = self.plan.ranks * self.grid.copies
        if self.world.size != expected:
            return (
                f"expected {expected} workers ({self.plan.ranks} ranks of plan {self.plan.name} x {self.grid.copies} "
                f"copies), got {self.world.size}; start another number of workers or make another plan"
            )
        wanted = self.plan.placement.stages_of(self.rank)
        got = tuple(stage.stage_index for stage in self.stages)
        if got != wanted or any(stage.stage_num != self.plan.stages for stage in self.stages):
            return (
                f"expected stages {list(wanted)} of {self.plan.stages}, as plan {self.plan.name} places them, "
                f"got {self.stages}; make other stages or another plan"
            )
        return ""

    def _make_copies_group(self) -> Optional[str]:
        if self.grid.copies == 1:
            return None
        return communication.create_group(self.world, "pipeline_copies", self.grid.same_stages(self.world.rank))


def _sorted(stages: Stages) -> list[PipelineStage]:
    if isinstance(stages, PipelineStage):
        return [stages]
    return sorted(stages, key=lambda stage: stage.stage_index)
