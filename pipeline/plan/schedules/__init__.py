"""Schedules: short pure functions from the number of ranks and micro-batches to a plan.

No schedule has recompute, sends or receives in it: those are passes (`pipeline.plan.passes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Callable

from pipeline.plan.action import PlanError
from pipeline.plan.plan import Plan
from pipeline.plan.schedules.basic import gpipe, interleaved_one_f_one_b, looped_bfs, one_f_one_b
from pipeline.plan.schedules.controllable_memory import v_half, v_min
from pipeline.plan.schedules.dualpipe import dualpipe_v
from pipeline.plan.schedules.v_shape import zb_v
from pipeline.plan.schedules.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "TAKES_VIRTUAL",
    "dualpipe_v",
    "gpipe",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "make_plan",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

SCHEDULES: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved_one_f_one_b,
        "bfs": looped_bfs,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
        "dualpipe-v": dualpipe_v,
    }
)

TAKES_VIRTUAL = frozenset({"interleaved", "bfs"})


def make_plan(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> Plan:
    """The plan of a named schedule.

    Args:
        name: a key of `SCHEDULES`.
        ranks: how many ranks.
        micro_batches: how many micro-batches.
        virtual: stages per rank, for the schedules that leave the choice (`TAKES_VIRTUAL`; 2 if not given).

    Raises:
        PlanError: an unknown name, or a choice of `virtual` that the schedule does not have.
    """
    if name not in SCHEDULES:
        raise PlanError(f"expected one of {', '.join(SCHEDULES)}, saw {name!r}")
    if name in TAKES_VIRTUAL:
        return SCHEDULES[name](ranks, micro_batches, 2 if virtual is None else virtual)
    plan = SCHEDULES[name](ranks, micro_batches)
    if virtual is not None and virtual * ranks != plan.stages:
        raise PlanError(f"expected {plan.stages // ranks} stages per rank, which {name} always has, saw {virtual}")
    return plan
