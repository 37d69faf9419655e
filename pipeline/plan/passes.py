"""Passes: from a plan to a plan. Each changes one thing and leaves the order of everything else as it is.

insert_recompute       adds R
split_backward         B becomes I and W
merge_backward         I and W become B
limit_pending_weight   moves W forward in time
insert_communication   adds sends and receives
remove_communication   takes them out

The order of sends and receives that cannot deadlock depends on the order of the compute actions. So each pass over the
compute actions of a plan that has sends and receives takes those out first and inserts them anew.
"""

from __future__ import annotations

import functools
import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Callable

from pipeline.plan.action import COMMUNICATION, Action, Kind, PlanError, backward, backward_input, backward_weight
from pipeline.plan.costs import Costs
from pipeline.plan.dependencies import Dependencies
from pipeline.plan.durations import Durations
from pipeline.plan.plan import Plan, Row

_Pass = Callable[..., Plan]
_Chunk = tuple[int, int]


def _on_compute_actions(compute_pass: _Pass) -> _Pass:
    @functools.wraps(compute_pass)
    def with_communication_kept(plan: Plan, *args: object, **kwargs: object) -> Plan:
        changed = compute_pass(remove_communication(plan), *args, **kwargs)
        return insert_communication(changed) if plan.has_communication else changed

    return with_communication_kept


@_on_compute_actions
def insert_recompute(plan: Plan, mode: str = "lazy", lead: int = 1, last_blocks: int | None = None) -> Plan:
    """Checkpoint every chunk: add an R before each B and I.

    Args:
        plan: a plan; an R that it has already is replaced.
        mode: "lazy": the backward replays once it has its gradient (the R fires no block ahead, `2R0:0`).
            "prefire": the R replays ahead, while the rank would wait for the gradient.
        lead: for "prefire", how many compute actions before its place after the gradient the R is fired, at least 1.
            1 puts it right before the backward: it runs as soon as the rank is free. More put it before `lead - 1`
            other compute actions too, but never before the chunk's own forward.
        last_blocks: for "prefire", replay only this many of the stage's last checkpointed blocks ahead (None: all).

    Raises:
        PlanError: an unknown mode, or a lead or last_blocks out of range.
    """
    if mode not in ("lazy", "prefire"):
        raise PlanError(f"expected lazy or prefire as recompute mode, saw {mode!r}")
    if lead < 1:
        raise PlanError(f"expected a lead of at least 1, saw {lead}")
    if last_blocks is not None and last_blocks < 0:
        raise PlanError(f"expected a number of blocks from 0 up, or None for all, saw {last_blocks}")
    if mode == "lazy":
        lead, last_blocks = 1, 0
    rows = tuple(_row_with_recompute(row, lead, last_blocks) for row in plan.rows)
    return plan.replace(rows=rows, name=f"{plan.name}+{mode}")


def _row_with_recompute(row: Row, lead: int, last_blocks: int | None) -> Row:
    compute = [action for action in row if action.kind is not Kind.R]
    fired_before: dict[int, list[Action]] = defaultdict(list)
    forward_at: dict[_Chunk, int] = {}
    for position, action in enumerate(compute):
        for stage, kind, micro_batch, _, _ in action.parts:
            if kind is Kind.F:
                forward_at[stage, micro_batch] = position
            elif kind is Kind.B or kind is Kind.I:
                earliest = forward_at.get((stage, micro_batch), -1) + 1
                fired_at = max(position - lead + 1, earliest)
                fired_before[fired_at].append(Action(stage, Kind.R, micro_batch, (), last_blocks))
    return tuple(step for position, action in enumerate(compute) for step in (*fired_before[position], action))


@_on_compute_actions
def split_backward(plan: Plan) -> Plan:
    """Every B becomes I and then W at once. A B in an overlapped pair stays whole, as the pair is one action."""
    return plan.replace(rows=tuple(tuple(_split(row)) for row in plan.rows), name=f"{plan.name}+split")


def _split(row: Row) -> Iterator[Action]:
    for action in row:
        if action.kind is Kind.B:
            yield backward_input(action.stage, action.micro_batch)
            yield backward_weight(action.stage, action.micro_batch)
        else:
            yield action


@_on_compute_actions
def merge_backward(plan: Plan) -> Plan:
    """Every I and its W become a B in the place of the I. An I in an overlapped pair becomes a B in that pair."""
    rows = tuple(tuple(_merged(action) for action in row if action.kind is not Kind.W) for row in plan.rows)
    return plan.replace(rows=rows, name=f"{plan.name}+merge")


def _merged(action: Action) -> Action:
    if action.sub_actions:
        return Action.overlap(*map(_merged, action.sub_actions))
    return backward(action.stage, action.micro_batch) if action.kind is Kind.I else action


@_on_compute_actions
def limit_pending_weight(plan: Plan, limit: int) -> Plan:
    """Let no rank have more than `limit` chunks between their I and their W: the oldest W moves up to right after the I
    that would exceed it. 0 puts every W right after its I."""
    if limit < 0:
        raise PlanError(f"expected a limit of pending dw from 0 up, saw {limit}")
    rows = tuple(tuple(_with_limit(row, limit)) for row in plan.rows)
    return plan.replace(rows=rows, name=f"{plan.name}+pending{limit}")


def _with_limit(row: Row, limit: int) -> Iterator[Action]:
    """Keep the order of the W's among each other where the limit does not force one."""
    pending: dict[_Chunk, None] = {}
    for action in row:
        if action.kind is Kind.W:
            if (action.stage, action.micro_batch) in pending:
                del pending[action.stage, action.micro_batch]
                yield action
            continue
        yield action
        for part in action.parts:
            if part.kind is Kind.I:
                pending[part.stage, part.micro_batch] = None
        while len(pending) > limit:
            stage, micro_batch = next(iter(pending))
            del pending[stage, micro_batch]
            yield backward_weight(stage, micro_batch)


def remove_communication(plan: Plan) -> Plan:
    """Take sends and receives out."""
    if not plan.has_communication:
        return plan
    rows = tuple(tuple(action for action in row if action.kind not in COMMUNICATION) for row in plan.rows)
    return plan.replace(rows=rows)


def insert_communication(plan: Plan, costs: Costs | None = None) -> Plan:
    """Add a send and a receive for everything that crosses ranks, in an order that cannot deadlock.

    The plan is run on paper. When an action ends, what it made is sent at once: the send goes to the end of the
    sender's row and the receive to the end of the receiver's, in the same moment. So all ranks see their transfers in
    the order of one common list, and no set of blocking sends and receives can wait for each other in a circle. If the
    costs are right and transfers take no time, no rank waits in a receive while it could compute.

    Args:
        plan: the plan; sends and receives that it has already are replaced.
        costs: time of each stage's actions, for that run; None: one unit each for F, I and W.

    Raises:
        PlanError: the plan cannot run to its end even without blocking.
    """
    plan = remove_communication(plan)
    dependencies, durations = Dependencies(plan), Durations(plan, costs or Costs())
    rows: list[list[Action]] = [[] for _ in plan.rows]
    todo = [deque(row) for row in plan.rows]
    arrival: dict[int, float] = {}
    running: list[tuple[float, int, Action]] = []

    def start_next(rank: int, now: float) -> None:
        needs = dependencies.needs(todo[rank][0]) if todo[rank] else [-1]
        if all(message in arrival for message in needs):
            action = todo[rank].popleft()
            rows[rank].append(action)
            start = max([now, *(arrival[message] for message in needs)])
            heapq.heappush(running, (start + durations.of(action), rank, action))

    idle = set(range(plan.ranks))
    now = 0.0
    while True:
        for rank in sorted(idle):
            start_next(rank, now)
        if not running:
            break
        idle -= {rank for _, rank, _ in running}
        now = running[0][0]
        while running and running[0][0] <= now + 1e-12 * abs(now):
            _, rank, action = heapq.heappop(running)
            idle.add(rank)
            for message in dependencies.gives(action):
                arrival[message] = now + durations.delays[dependencies.lane(message)]
                _append_transfer(plan, dependencies.lane(message), message % plan.micro_batches, rows)
    stuck = [f"rank {rank} at {actions[0]}" for rank, actions in enumerate(todo) if actions]
    if stuck:
        raise PlanError(f"expected a plan that runs to its end, saw {', '.join(stuck)} stuck; validate(plan) says why")
    return plan.replace(rows=tuple(map(tuple, rows)))


def _append_transfer(plan: Plan, lane: int, micro_batch: int, rows: list[list[Action]]) -> None:
    """Send a message if the stage that needs it is on another rank."""
    stage, is_gradient = divmod(lane, 2)
    receiver = stage - 1 if is_gradient else stage + 1
    if not plan.placement.crosses(min(stage, receiver)) or receiver < 0:
        return
    send, receive = (Kind.SEND_B, Kind.RECV_B) if is_gradient else (Kind.SEND_F, Kind.RECV_F)
    rows[plan.placement.rank_of(stage)].append(Action(stage, send, micro_batch))
    rows[plan.placement.rank_of(receiver)].append(Action(receiver, receive, micro_batch))
