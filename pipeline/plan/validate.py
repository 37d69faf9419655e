"""What is wrong with a plan.

Checked in this order, and 3 and 4 only if nothing was found before:
1. Each action alone: stage and micro-batch in range, on the rank that holds the stage, known to its neighbours.
2. Each chunk: one F, one B or one I and one W, at most one R; F before R before B or I, I before W.
3. Sends and receives, if there are any: one of each for each transfer between ranks; a send after what it sends, a
   receive before what it feeds.
4. The plan runs to its end when every send blocks until its receive is reached, and messages between two ranks keep
   their order.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.plan.action import COMMUNICATION, SENDS, Action, Kind, PlanError
from pipeline.plan.dependencies import Dependencies
from pipeline.plan.plan import Plan

_BACKWARD = (Kind.B, Kind.I)
_MATCHING = {Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B}
_SHOWN = 20


class Fault(NamedTuple):
    """Something wrong. A missing action has the length of its row as position."""

    rank: int
    position: int
    action: Action
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}, {self.action}: {self.reason}"


def validate(plan: Plan) -> Plan:
    """Return the plan if nothing is wrong with it.

    Raises:
        PlanError: with every fault found.
    """
    found = faults(plan)
    if found:
        lines = [str(fault) for fault in found[:_SHOWN]]
        if len(found) > _SHOWN:
            lines.append(f"and {len(found) - _SHOWN} more")
        raise PlanError(f"expected a plan that can run, saw {len(found)} faults in {plan.name!r}:\n" + "\n".join(lines))
    return plan


def faults(plan: Plan) -> list[Fault]:
    """Everything that is wrong with a plan, in the order of ranks and positions."""
    if len(plan.rows) != plan.ranks:
        raise PlanError(f"expected {plan.ranks} rows (the placement's ranks), saw {len(plan.rows)}")
    found = [*_stray_actions(plan), *_chunk_faults(plan)] or _transfer_faults(plan) or _deadlock(plan)
    return sorted(found, key=lambda fault: fault[:2])


def _stray_actions(plan: Plan) -> list[Fault]:
    found = []
    for rank, row in enumerate(plan.rows):
        for position, action in enumerate(row):
            for part in action.parts:
                reason = _why_stray(plan, rank, part)
                if reason:
                    found.append(Fault(rank, position, action, reason))
    return found


def _why_stray(plan: Plan, rank: int, part: Action) -> str:
    stage, kind, micro_batch, _, _ = part
    if not 0 <= stage < plan.stages:
        return f"stage {stage} is out of range, the plan has {plan.stages} stages"
    if not 0 <= micro_batch < plan.micro_batches:
        return f"micro-batch {micro_batch} is out of range, the plan has {plan.micro_batches}"
    if plan.placement.rank_by_stage[stage] != rank:
        return f"stage {stage} belongs to rank {plan.placement.rank_by_stage[stage]}"
    if kind in COMMUNICATION:
        peer = peer_stage(part)
        if not 0 <= peer < plan.stages:
            return f"stage {stage} has no neighbour to exchange this with"
        if plan.placement.rank_by_stage[peer] == rank:
            return f"stages {stage} and {peer} are on the same rank, nothing is sent between them"
    return ""


def peer_stage(action: Action) -> int:
    """The stage at the other end of a send or receive."""
    forwards = action.kind in (Kind.SEND_F, Kind.RECV_B)
    return action.stage + 1 if forwards else action.stage - 1


def _chunk_faults(plan: Plan) -> list[Fault]:
    found = []
    for rank, row in enumerate(plan.rows):
        seen: dict[tuple[int, int], set[Kind]] = {
            (stage, micro_batch): set()
            for stage in plan.placement.stages_of(rank)
            for micro_batch in range(plan.micro_batches)
        }
        for position, action in enumerate(row):
            for part in action.parts:
                if part.kind in COMMUNICATION:
                    continue
                kinds = seen.get((part.stage, part.micro_batch))
                if kinds is None:
                    continue  # not of this rank: a stray action
                reason = _why_out_of_order(part, kinds)
                if part is action.parts[-1] and len({other[::2] for other in action.parts}) < len(action.parts):
                    reason = "a chunk cannot overlap with itself"
                if reason:
                    found.append(Fault(rank, position, action, reason))
                kinds.add(part.kind)
        for (stage, micro_batch), kinds in seen.items():
            found += [Fault(rank, len(row), Action(stage, kind, micro_batch), "is missing") for kind in _missing(kinds)]
    return found


def _why_out_of_order(part: Action, before: set[Kind]) -> str:
    """Why an action may not follow those of its chunk that came before it."""
    kind = part.kind
    if kind in before:
        return f"{part} is there twice"
    backward_done = next((done for done in _BACKWARD if done in before), None)
    if kind in _BACKWARD and backward_done:
        return f"the backward of the chunk is there twice, as {backward_done.value} and as {kind.value}"
    if kind is not Kind.F and Kind.F not in before:
        return f"comes before the forward {part.stage}F{part.micro_batch}"
    if kind is Kind.R and backward_done:
        return f"a recompute after its backward {part.stage}{backward_done.value}{part.micro_batch}"
    if kind is Kind.W and Kind.B in before:
        return "the full backward has made the weight gradients already"
    if kind is Kind.W and Kind.I not in before:
        return f"comes before its dx {part.stage}I{part.micro_batch}"
    return ""


def _missing(kinds: set[Kind]) -> list[Kind]:
    missing = [] if Kind.F in kinds else [Kind.F]
    if Kind.B in kinds:
        return missing
    if Kind.I in kinds or Kind.W in kinds:
        return missing + [kind for kind in (Kind.I, Kind.W) if kind not in kinds]
    return [*missing, Kind.B]


def _transfer_faults(plan: Plan) -> list[Fault]:
    if not plan.has_communication:
        return []
    found = []
    for rank, row in enumerate(plan.rows):
        place = {}
        for position, action in enumerate(row):
            for part in action.parts:
                kind = Kind.B if part.kind is Kind.I else part.kind
                key = (part.stage, kind, part.micro_batch)
                if kind in COMMUNICATION and key in place:
                    found.append(Fault(rank, position, action, f"{part} is there twice"))
                place.setdefault(key, position)
        for transfer, compute in _transfers_of(plan, rank):
            position, other = place.get(transfer), place[compute]
            action = Action(*transfer)
            if position is None:
                found.append(Fault(rank, len(row), action, "is missing"))
            elif transfer[1] in SENDS and position < other:
                found.append(Fault(rank, position, action, f"is sent before it is made by {row[other]}"))
            elif transfer[1] not in SENDS and position > other:
                found.append(Fault(rank, position, action, f"is received after it is needed by {row[other]}"))
    return found


def _transfers_of(plan: Plan, rank: int) -> list[tuple[tuple[int, Kind, int], tuple[int, Kind, int]]]:
    """Every transfer that a rank takes part in, with the compute that makes it or needs it."""
    pairs = []
    for stage in plan.placement.stages_of(rank):
        kinds = []
        if plan.placement.crosses(stage):
            kinds += [(Kind.SEND_F, Kind.F), (Kind.RECV_B, Kind.B)]
        if stage and plan.placement.crosses(stage - 1):
            kinds += [(Kind.RECV_F, Kind.F), (Kind.SEND_B, Kind.B)]
        for micro_batch in range(plan.micro_batches):
            pairs += [((stage, kind, micro_batch), (stage, compute, micro_batch)) for kind, compute in kinds]
    return pairs


def _deadlock(plan: Plan) -> list[Fault]:
    """Run the rows with blocking sends; every rank that does not reach its end is a fault."""
    dependencies = Dependencies(plan)
    position = [0] * plan.ranks
    given: set[int] = set()
    waiting: dict[int, list[int]] = {}
    at_transfer: dict[tuple[int, int, bool, int], int] = {}
    runnable = list(range(plan.ranks))
    while runnable:
        rank = runnable.pop()
        row = plan.rows[rank]
        while position[rank] < len(row):
            action = row[position[rank]]
            if action.kind in COMMUNICATION:
                peer = at_transfer.pop(_transfer(action), None)
                if peer is None:
                    at_transfer[_transfer(action)] = rank
                    break
                position[peer] += 1
                runnable.append(peer)
            else:
                missing = next((message for message in dependencies.needs(action) if message not in given), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                for message in dependencies.gives(action):
                    given.add(message)
                    runnable += waiting.pop(message, ())
            position[rank] += 1
    return [
        Fault(rank, position[rank], row[position[rank]], _why_stuck(plan, dependencies, rank, position, given))
        for rank, row in enumerate(plan.rows)
        if position[rank] < len(row)
    ]


def _transfer(action: Action) -> tuple[int, int, bool, int]:
    """What a send and its receive have in common: the two stages, the direction, the micro-batch."""
    peer = peer_stage(action)
    is_forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    return min(action.stage, peer), max(action.stage, peer), is_forward, action.micro_batch


def _why_stuck(plan: Plan, dependencies: Dependencies, rank: int, position: list[int], given: set[int]) -> str:
    action = plan.rows[rank][position[rank]]
    if action.kind in COMMUNICATION:
        stage = peer_stage(action)
        awaited = f"{stage}{_MATCHING[action.kind].value}{action.micro_batch}"
    else:
        message = next(message for message in dependencies.needs(action) if message not in given)
        stage = dependencies.lane(message) // 2
        awaited = f"the {dependencies.name(message)}"
    peer = plan.placement.rank_of(stage)
    return f"deadlock: waits for {awaited} on rank {peer}, which is {_where(plan, peer, position)}"


def _where(plan: Plan, rank: int, position: list[int]) -> str:
    row = plan.rows[rank]
    if position[rank] == len(row):
        return "at its end"
    return f"at position {position[rank]} with {row[position[rank]]}"
