"""What the stages of a plan wait for from each other. Everything else follows from the order of the rows.

A message is an index: what a stage hands to the next one (its forward) or to the one before (its gradient) for a
micro-batch. `lane` numbers the pairs of stage and direction.
"""

from __future__ import annotations

from pipeline.plan.action import Action, Kind
from pipeline.plan.plan import Plan


class Dependencies:
    """The messages that actions of a plan need and give.

    If the plan has sends and receives, what crosses ranks is given by the send and needed by the receive. Otherwise it
    goes straight from one compute action to the other.
    """

    def __init__(self, plan: Plan) -> None:
        self.micro_batches = plan.micro_batches
        self.stages = plan.stages
        self.lanes = 2 * plan.stages
        self.messages = self.lanes * plan.micro_batches
        self.explicit = plan.has_communication
        # crosses[s]: whether stages s - 1 and s are on different ranks.
        self.crosses = [False, *(plan.placement.crosses(stage) for stage in range(plan.stages))]

    def needs(self, action: Action) -> list[int]:
        """F needs the forward of the stage before, B and I the gradient of the stage after."""
        messages = []
        for stage, kind, micro_batch, _, _ in action.sub_actions or (action,):
            if kind is Kind.F:
                if stage and not (self.explicit and self.crosses[stage]):
                    messages.append(self.forward(stage - 1, micro_batch))
            elif kind is Kind.B or kind is Kind.I:
                if stage + 1 < self.stages and not (self.explicit and self.crosses[stage + 1]):
                    messages.append(self.gradient(stage + 1, micro_batch))
            elif kind is Kind.RECV_F:
                messages.append(self.forward(stage - 1, micro_batch))
            elif kind is Kind.RECV_B:
                messages.append(self.gradient(stage + 1, micro_batch))
        return messages

    def gives(self, action: Action) -> list[int]:
        """F gives the forward of its stage, B and I its gradient, unless a send has to do it."""
        messages = []
        for stage, kind, micro_batch, _, _ in action.sub_actions or (action,):
            if kind is Kind.SEND_F or (kind is Kind.F and not (self.explicit and self.crosses[stage + 1])):
                messages.append(self.forward(stage, micro_batch))
            elif kind is Kind.SEND_B or (
                (kind is Kind.B or kind is Kind.I) and not (self.explicit and self.crosses[stage])
            ):
                messages.append(self.gradient(stage, micro_batch))
        return messages

    def forward(self, stage: int, micro_batch: int) -> int:
        """The message with the output of a stage."""
        return 2 * stage * self.micro_batches + micro_batch

    def gradient(self, stage: int, micro_batch: int) -> int:
        """The message with the input gradient of a stage."""
        return (2 * stage + 1) * self.micro_batches + micro_batch

    def lane(self, message: int) -> int:
        """2 * stage for a forward, 2 * stage + 1 for a gradient."""
        return message // self.micro_batches

    def name(self, message: int) -> str:
        """The message in words."""
        lane, micro_batch = divmod(message, self.micro_batches)
        return f"{'gradient' if lane % 2 else 'forward'} of micro-batch {micro_batch} from stage {lane // 2}"
