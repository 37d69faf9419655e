"""A class for each published schedule: its name, its plan, nothing else."""

from __future__ import annotations

from typing import Any, ClassVar, Optional

from pipeline.execution.schedule import Schedule, Stages, _sorted
from pipeline.plan import insert_recompute, make_plan, split_backward
from pipeline.plan.schedules import TAKES_VIRTUAL


class NamedSchedule(Schedule):
    """A schedule whose plan is made from its name.

    Args:
        stages: the stages of this rank, one or more.
        micro_batch_num: into how many parts `run` cuts the batch.
        recompute: "prefire" replays checkpointed blocks before their gradient is here, "lazy" when it is; None leaves
            the replay to the backward, without an action of its own.
        lead: how many compute actions ahead of its place a pre-fired replay may start.
        last_blocks: pre-fire only so many of a stage's last blocks; None for all.
        split: make dx and dw two actions, for schedules whose backward is whole.
        options: as for `Schedule`.

    Raises:
        PlanError: the schedule does not exist for so many ranks, stages or micro-batches.
    """

    name: ClassVar[str]

    def __init__(
        self,
        stages: Stages,
        micro_batch_num: int,
        recompute: Optional[str] = "prefire",
        lead: int = 1,
        last_blocks: Optional[int] = None,
        split: bool = False,
        **options: Any,
    ) -> None:
        local = _sorted(stages)
        ranks, virtual = local[0].stage_num // len(local), len(local)
        plan = make_plan(self.name, ranks, micro_batch_num, virtual if self.name in TAKES_VIRTUAL else None)
        if split:
            plan = split_backward(plan)
        if recompute is not None:
            plan = insert_recompute(plan, recompute, lead=lead, last_blocks=last_blocks)
        super().__init__(plan, local, **options)


class ScheduleGPipe(NamedSchedule):
    """All forwards, then all backwards (Huang et al. 2019, GPipe)."""

    name = "gpipe"


class Schedule1F1B(NamedSchedule):
    """One forward, one backward (Narayanan et al. 2019, PipeDream, with a flush)."""

    name = "1f1b"


class ScheduleInterleaved1F1B(NamedSchedule):
    """1F1B with several stages per rank (Narayanan et al. 2021, section 2.2)."""

    name = "interleaved"


class ScheduleLoopedBFS(NamedSchedule):
    """Several stages per rank, each with all its micro-batches at once (Lamy-Poirier 2023)."""

    name = "bfs"


class ScheduleZBH1(NamedSchedule):
    """dx and dw apart, with the memory of 1F1B (Qi et al. 2023, ZB-H1)."""

    name = "zb-h1"


class ScheduleZBH2(NamedSchedule):
    """dx and dw apart, more memory, no bubble but at the ends (Qi et al. 2023, ZB-H2)."""

    name = "zb-h2"


class ScheduleZBV(NamedSchedule):
    """Two stages per rank in a V, dx and dw apart (Qi et al. 2023, section 6, ZB-V)."""

    name = "zb-v"


class ScheduleVHalf(NamedSchedule):
    """Two stages per rank in a V, with half the memory of 1F1B (Qi et al. 2024, V-Half)."""

    name = "v-half"


class ScheduleVMin(NamedSchedule):
    """Two stages per rank in a V, with a third of the memory of 1F1B (Qi et al. 2024, V-Min)."""

    name = "v-min"


class ScheduleDualPipeV(NamedSchedule):
    """Two stages per rank in a V, forwards overlapped with backwards (DeepSeek-AI 2025, cut in half: DualPipeV)."""

    name = "dualpipe-v"
