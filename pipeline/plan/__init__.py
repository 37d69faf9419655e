"""Pipeline plans as data. Pure Python: nothing here imports MindSpore."""

from __future__ import annotations

from pipeline.plan.action import Action, Kind, PlanError
from pipeline.plan.costs import Communication, Costs, Memory
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
    "loop",
    "make_plan",
    "mapping",
    "simulate",
    "v_shape",
    "validate",
]
