"""Interprets one rank's row of a plan.

Rules:
1. Actions run in the order of the row, one at a time, on the calling thread. Nothing is reordered, so the trace of a
   step is the row.
2. An action starts when its inputs are here. Only F, B, I and overlapped pairs wait, each for what it needs itself; a
   send does not wait for its receiver, a receive is asked for, and both go on. R and W need only what is on this rank:
   a gradient that is under way arrives while they run.
3. Values go from stage to stage without a message when both stages are on this rank. The reader cannot tell.
4. Gradients go back flat: one entry per tensor that the next stage took from its predecessor, None where none is
   needed.
5. What an action made is dropped when it is used. At the end of a step nothing is left: no chunk, no value, no message.
6. The loss is scaled once: the last stage's backward starts from `loss_scale`, and no other place scales anything.
7. An action that raises ends the step: every chunk of the step is released, and the error says where in the row it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from mindspore import Tensor, ops

from pipeline.execution.chunk import Chunk
from pipeline.execution.faults import ActionError
from pipeline.execution.microbatch import Inputs
from pipeline.execution.nest import leaves, map_leaves
from pipeline.execution.stage import PipelineStage
from pipeline.execution.trace import Trace
from pipeline.execution.transport import Channel, Message, Transport
from pipeline.execution.watch import Watch
from pipeline.plan import Action, Kind, Plan
from pipeline.plan.action import RECEIVES, SENDS

Hook = Callable[["Step", Action], None]


class Step:
    """One pass over the row: what the actions of a step share.

    A hook gets this as its first argument. `run_default(action)` does what the executor would have done.

    Attributes:
        stages: the stages of this rank, by index.
        results: what the last stage returned, by micro-batch.
        training: whether gradients are made.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        inputs: Sequence[Inputs],
        loss_scale: Optional[float],
    ) -> None:
        self.stages = stages
        self.results: dict[int, Any] = {}
        self.training = loss_scale is not None
        self._transport = transport
        self._inputs = inputs
        self._loss_scale = loss_scale
        self._chunks: dict[tuple[int, int], Chunk] = {}
        self._values: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], Any] = {}
        self._given: dict[tuple[int, int], Any] = {}
        self._nests: dict[tuple[int, int], Any] = {}
        self._taken: dict[tuple[int, int], int] = {}
        self._defaults: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.R: self._recompute,
            Kind.B: self._backward,
            Kind.I: self._backward_input,
            Kind.W: self._backward_weight,
            Kind.SEND_F: self._send_output,
            Kind.RECV_F: self._post,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._post,
            Kind.OVERLAP_F_B: self._overlap,
        }

    def chunk(self, action: Action) -> Optional[Chunk]:
        """The chunk that an action belongs to, None before its forward and after its release."""
        return self._chunks.get((action.stage, action.micro_batch))

    def wait_for_inputs(self, action: Action) -> None:
        """Wait for what an action needs from other stages."""
        for part in action.parts:
            key = (part.stage, part.micro_batch)
            if part.kind is Kind.F and part.stage > 0:
                self._given[key] = self._take(self._values, part, part.stage - 1, "F")
            elif part.kind in (Kind.B, Kind.I) and not self.stages[part.stage].is_last:
                self._given[key] = self._take(self._gradients, part, part.stage + 1, "B")

    def run_default(self, action: Action) -> None:
        """Do an action whose inputs are here."""
        self._defaults[action.kind](action)

    def release(self) -> None:
        """Let go of everything that the step still holds."""
        for chunk in self._chunks.values():
            chunk.release()
        for store in (self._chunks, self._values, self._gradients, self._given, self._nests, self._taken):
            store.clear()

    def held(self) -> int:
        """How many chunks and values the step holds."""
        return len(self._chunks) + len(self._values) + len(self._gradients) + len(self._given)

    def _take(self, store: dict, part: Action, source: int, kind: str) -> Any:
        """What another stage made for an action: from this rank's store, or from a message."""
        if source in self.stages:
            return store.pop((source, part.micro_batch))
        return self._transport.receive(Message(Channel(source, part.stage, kind), part.micro_batch))

    def _forward(self, action: Action) -> None:
        stage, key = self.stages[action.stage], (action.stage, action.micro_batch)
        given_args, given_kwargs = self._inputs[action.micro_batch]
        if stage.is_first:
            args, kwargs = given_args, stage.keywords(given_kwargs)
        else:
            args, kwargs = _as_inputs(self._given.pop(key))
            self._taken[key] = sum(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs)))
            kwargs = {**kwargs, **stage.keywords(given_kwargs)}
        if self.training:
            chunk = self._chunks[key] = Chunk(action.stage, action.micro_batch, stage.weights)
            outputs = chunk.forward(stage.submodule, *args, **kwargs)
            self._nests[key] = map_leaves(lambda leaf: isinstance(leaf, Tensor), outputs)
        else:
            outputs = stage.submodule(*args, **kwargs)
        if stage.is_last:
            self.results[action.micro_batch] = outputs
        else:
            self._values[key] = outputs

    def _recompute(self, action: Action) -> None:
        if action.last_blocks != 0:
            self._chunks[action.stage, action.micro_batch].recompute(action.last_blocks)

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        self._keep_input_gradients(action, self._chunks[key].backward(self._output_gradients(action)))
        del self._chunks[key]

    def _backward_input(self, action: Action) -> None:
        key = (action.stage, action.micro_batch)
        self._keep_input_gradients(action, self._chunks[key].backward_input(self._output_gradients(action)))

    def _backward_weight(self, action: Action) -> None:
        self._chunks.pop((action.stage, action.micro_batch)).backward_weight()

    def _overlap(self, action: Action) -> None:
        for part in action.sub_actions:
            self.run_default(part)

    def _send_output(self, action: Action) -> None:
        self._transport.send(message_of(action), self._values.pop((action.stage, action.micro_batch)))

    def _send_gradient(self, action: Action) -> None:
        self._transport.send(message_of(action), self._gradients.pop((action.stage, action.micro_batch)))

    def _post(self, action: Action) -> None:
        self._transport.post(message_of(action))

    def _output_gradients(self, action: Action) -> Any:
        """The gradients to start a backward from, in the nest of the stage's outputs."""
        key = (action.stage, action.micro_batch)
        nest = self._nests.pop(key)
        if self.stages[action.stage].is_last:
            given = iter([self._loss_gradient(action)])
            return map_leaves(lambda is_tensor: next(given, None), nest)
        given = iter(self._given.pop(key))
        return map_leaves(lambda is_tensor: next(given) if is_tensor else None, nest)

    def _loss_gradient(self, action: Action) -> Tensor:
        loss = leaves(self.results[action.micro_batch])[0]
        return ops.full_like(loss, self._loss_scale)

    def _keep_input_gradients(self, action: Action, gradients: Sequence[Optional[Tensor]]) -> None:
        if action.stage > 0:
            key = (action.stage, action.micro_batch)
            self._gradients[key] = tuple(gradients[: self._taken.pop(key)])


class Executor:
    """Runs one rank's row, step after step.

    Args:
        plan: a valid plan with sends and receives.
        rank: the row to run.
        stages: the stages of this rank.
        transport: sends and receives for these stages.
        watch: is told which action runs; of a receive it only takes note.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Sequence[PipelineStage],
        transport: Transport,
        watch: Watch,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.trace = Trace()
        self._stages = {stage.stage_index: stage for stage in stages}
        self._transport = transport
        self._watch = watch
        self._hooks: dict[Kind, Hook] = {}
        self._expected = expected_messages(plan, rank)

    def register(self, kind: Kind, hook: Optional[Hook]) -> None:
        """Call `hook(step, action)` for every action of a kind instead of running it; None takes it back."""
        if hook is None:
            self._hooks.pop(kind, None)
        else:
            self._hooks[kind] = hook

    def run(self, inputs: Sequence[Inputs], loss_scale: Optional[float] = None) -> list[Any]:
        """Run the row once.

        Args:
            inputs: positional and keyword inputs of each micro-batch.
            loss_scale: the gradient of each micro-batch's loss; None to make no gradients (the row must have none).

        Returns:
            what the last stage returned for each micro-batch, empty on a rank without the last stage.

        Raises:
            ActionError: an action failed; says which, where in the row, and why.
        """
        step = Step(self._stages, self._transport, inputs, loss_scale)
        self.trace = Trace()
        self._transport.begin_step(self._expected)
        try:
            for position, action in enumerate(self.plan.rows[self.rank]):
                come_to = self._watch.pass_by if action.kind in RECEIVES else self._watch.enter
                come_to(position)
                self._run_action(step, action)
            self._watch.waits()
            self._transport.flush()
        finally:
            step.release()
        return [step.results[micro_batch] for micro_batch in sorted(step.results)]

    def _run_action(self, step: Step, action: Action) -> None:
        try:
            asked = Trace.now()
            step.wait_for_inputs(action)
            if action.kind not in SENDS:  # a send may wait for the process that receives
                self._watch.works()
            start = Trace.now()
            hook = self._hooks.get(action.kind)
            if hook is None:
                step.run_default(action)
            else:
                hook(step, action)
            self.trace.add(action, asked, start, Trace.now())
        except Exception as error:
            raise ActionError(self._watch.decide(f"{type(error).__name__}: {error}")) from error


def message_of(action: Action) -> Message:
    """The message that a send or a receive is about."""
    if action.kind is Kind.SEND_F:
        channel = Channel(action.stage, action.stage + 1, "F")
    elif action.kind is Kind.RECV_F:
        channel = Channel(action.stage - 1, action.stage, "F")
    elif action.kind is Kind.SEND_B:
        channel = Channel(action.stage, action.stage - 1, "B")
    else:
        channel = Channel(action.stage + 1, action.stage, "B")
    return Message(channel, action.micro_batch)


def expected_messages(plan: Plan, rank: int) -> list[Message]:
    """Everything that other ranks send to this one, each rank's messages in the order of its row."""
    messages = [message_of(action) for row in plan.rows for action in row if action.kind in SENDS]
    return [message for message in messages if plan.placement.rank_of(message.channel.destination) == rank]


def forward_only(plan: Plan) -> Plan:
    """The plan without anything that belongs to a backward."""
    kinds = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    rows = tuple(tuple(part for action in row for part in action.parts if part.kind in kinds) for row in plan.rows)
    return plan.replace(rows=rows, name=f"{plan.name}+forward")


def _as_inputs(value: Any) -> Inputs:
    """What a stage returned, as inputs of the next one."""
    if isinstance(value, dict):
        return (), value
    return (tuple(value), {}) if isinstance(value, (tuple, list)) else ((value,), {})
