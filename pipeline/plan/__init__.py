"""Pipeline plans as data. Pure Python: nothing here imports MindSpore."""

from __future__ import annotations

from pipeline.plan.action import Action, Kind, PlanError
from pipeline.plan.costs import Communication, Costs, Memory
from pipeline.plan.passes import (
    insert_communication,
    insert_recompute,
    limit_pending_weight,
    merge_backward,
    remove_communication,
    split_backward,
)
from pipeline.plan.placement import Placement, loop, mapping, v_shape
from pipeline.plan.plan import Plan
from pipeline.plan.schedules import SCHEDULES, make_plan
from pipeline.plan.simulate import Event, Simulation, simulate
from pipeline.plan.validate import Fault, faults, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Communication",
    "Costs",
    "Event",
    "Fault",
    "Kind",
    "Memory",
    "Placement",
    "Plan",
    "PlanError",
    "Simulation",
    "faults",
    "insert_communication",
    "insert_recompute",
    "limit_pending_weight",
    "loop",
    "make_plan",
    "mapping",
    "merge_backward",
    "remove_communication",
    "simulate",
    "split_backward",
    "v_shape",
    "validate",
]
