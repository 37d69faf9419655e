"""How long the actions and transfers of a plan take, under given costs."""

from __future__ import annotations

from pipeline.plan.action import Action, Kind
from pipeline.plan.costs import Costs, per_stage, share_of_last
from pipeline.plan.plan import Plan


class Durations:
    """The time of each action of a plan, and of each transfer (`delays`, by lane of `Dependencies`)."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        stages = plan.stages
        self.forward = per_stage(costs.forward, stages, "forward")
        self.backward_input = per_stage(costs.backward_input, stages, "backward_input")
        self.backward_weight = per_stage(costs.backward_weight, stages, "backward_weight")
        self.recompute = per_stage(costs.recompute, stages, "recompute")
        self.blocks = per_stage(costs.blocks, stages, "blocks")
        self.overlapped = None
        if costs.overlapped is not None:
            self.overlapped = per_stage(costs.overlapped, stages, "overlapped")
        self.replayed_by_backward = {
            (action.stage, action.micro_batch): self.recompute[action.stage]
            * (1.0 - share_of_last(action.last_blocks, self.blocks[action.stage]))
            for row in plan.rows
            for action in row
            if action.last_blocks is not None
        }
        self.delays = [0.0] * (2 * stages)
        forward_times = costs.communication.forward_times(stages)
        backward_times = costs.communication.backward_times(stages)
        for stage in range(stages - 1):
            if plan.placement.crosses(stage):
                self.delays[2 * stage] = forward_times[stage]
                self.delays[2 * stage + 3] = backward_times[stage + 1]

    def of(self, action: Action) -> float:
        """The time that an action keeps its rank busy; none for sends and receives."""
        stage, kind, micro_batch, sub_actions, last_blocks = action
        if kind is Kind.F:
            return self.forward[stage]
        if kind is Kind.W:
            return self.backward_weight[stage]
        if kind is Kind.I:
            return self.backward_input[stage] + self.replayed_by_backward.get((stage, micro_batch), 0.0)
        if kind is Kind.B:
            time = self.backward_input[stage] + self.backward_weight[stage]
            return time + self.replayed_by_backward.get((stage, micro_batch), 0.0)
        if kind is Kind.R:
            return self.recompute[stage] * share_of_last(last_blocks, self.blocks[stage])
        if kind is Kind.OVERLAP_F_B:
            if self.overlapped is None:
                return sum(map(self.of, sub_actions))
            backward = sub_actions[1]
            return self.overlapped[stage] + self.replayed_by_backward.get((backward.stage, backward.micro_batch), 0.0)
        return 0.0
