"""A second opinion on plans, written without the validator and the simulator."""

from __future__ import annotations

from typing import Callable

import pytest

from pipeline.plan import Plan


@pytest.fixture(scope="session")
def harm() -> Callable[[Plan], str]:
    """Run a plan the plainest way there is; say what goes wrong, or nothing."""
    return _harm


def _harm(plan: Plan) -> str:
    """Sends block until the peer stands at the matching receive. Without sends, stages wait for each other."""
    done: set[str] = set()
    at = [0] * len(plan.rows)
    written_out = any("SEND" in str(action) for row in plan.rows for action in row)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(plan.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                if "SEND" in str(action) or "RECV" in str(action):
                    peer = _peer(plan, rank, action, at)
                    if peer is None:
                        break
                    for side in (rank, peer):
                        wrong = _run(plan, side, plan.rows[side][at[side]], done, written_out)
                        if wrong:
                            return wrong
                        at[side] += 1
                elif not written_out and _waits(plan, action, done):
                    break
                else:
                    if len({(part.stage, part.micro_batch) for part in action.parts}) < len(action.parts):
                        return f"{action} overlaps with itself"
                    for part in action.parts:
                        wrong = _run(plan, rank, part, done, written_out)
                        if wrong:
                            return wrong
                    at[rank] += 1
                moved = True
    if any(at[rank] < len(row) for rank, row in enumerate(plan.rows)):
        return "deadlock"
    return _incomplete(plan, done)


def _peer(plan: Plan, rank: int, action, at: list[int]) -> int | None:
    """The rank that stands at the other end of a transfer."""
    forwards = action.kind.value in ("SEND_F", "RECV_B")
    other = action.stage + (1 if forwards else -1)
    kind = action.kind.value.replace("SEND", "X").replace("RECV", "SEND").replace("X", "RECV")
    for peer, row in enumerate(plan.rows):
        if peer != rank and at[peer] < len(row) and str(row[at[peer]]) == f"{other}{kind}{action.micro_batch}":
            return peer
    return None


def _source(plan: Plan, part) -> str:
    """What a compute action needs from another stage."""
    if part.kind.value == "F" and part.stage:
        return f"{part.stage - 1}F{part.micro_batch}"
    if part.kind.value in "BI" and part.stage + 1 < plan.stages:
        return f"{part.stage + 1}G{part.micro_batch}"
    return ""


def _waits(plan: Plan, action, done: set[str]) -> bool:
    return any(_source(plan, part) and _source(plan, part) not in done for part in action.parts)


def _run(plan: Plan, rank: int, part, done: set[str], written_out: bool) -> str:
    """Do one action after checking what it needs from its own rank."""
    stage, kind, micro_batch = part.stage, part.kind.value, part.micro_batch
    name = f"{stage}{kind}{micro_batch}"
    if not (stage < plan.stages and micro_batch < plan.micro_batches and plan.placement.rank_by_stage[stage] == rank):
        return f"{name} is not for rank {rank}"
    if name in done:
        return f"{name} twice"
    forward, gradient = f"{stage}F{micro_batch}", f"{stage}G{micro_batch}"
    needs = {"F": [], "R": [forward], "B": [forward], "I": [forward], "W": [f"{stage}I{micro_batch}"]}.get(kind)
    if needs is None:
        needs = {"SEND_F": [forward], "SEND_B": [gradient]}.get(kind, [])
    if written_out and kind in ("F", "B", "I") and _source(plan, part):
        neighbour = stage - 1 if kind == "F" else stage + 1
        crosses = plan.placement.rank_by_stage[neighbour] != rank
        needs.append(f"{stage}RECV_{'F' if kind == 'F' else 'B'}{micro_batch}" if crosses else _source(plan, part))
    if kind in ("B", "I", "R") and gradient in done:
        return f"{name} after the backward"
    missing = [need for need in needs if need not in done]
    if missing:
        return f"{name} before {missing[0]}"
    done.add(name)
    if kind in ("B", "I"):
        done.add(gradient)
    return ""


def _incomplete(plan: Plan, done: set[str]) -> str:
    for stage in range(plan.stages):
        for micro_batch in range(plan.micro_batches):
            whole = f"{stage}B{micro_batch}" in done or f"{stage}W{micro_batch}" in done
            if not whole:
                return f"no backward of {stage}, {micro_batch}"
    return ""
