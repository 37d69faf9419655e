"""What the ranks' answers say about a case: a list of problems, empty if all is well, and the figures of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scripts.regression.cases import Case

TOLERANCE = 1e-6
"""Relative, for the loss and for each gradient: the order of additions differs from the one-process run."""
MEMORY_TOLERANCE = 0.01
"""Relative, for the bytes that chunks hold beside the simulator's."""

Answer = Mapping[str, Any]


class Verdict(NamedTuple):
    """The outcome of a case.

    Attributes:
        case: the case.
        problems: what is wrong, one sentence each.
        figures: what was measured, over all ranks.
        seconds: how long the case took, construction and all its steps.
    """

    case: Case
    problems: tuple[str, ...]
    figures: Mapping[str, Any]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_row(self) -> dict[str, Any]:
        """As plain values, for the JSON report."""
        return {
            "name": self.case.name,
            **self.case._asdict(),
            "outcome": "passed" if self.passed else "failed",
            "problems": list(self.problems),
            "figures": dict(self.figures),
            "seconds": self.seconds,
        }


def broken(case: Case, reason: str, seconds: float) -> Verdict:
    """The verdict on a case that ended its job."""
    return Verdict(case, (reason,), {}, seconds)


def judge(case: Case, answers: Sequence[Answer]) -> Verdict:
    """Judge a case by the answers of all its ranks."""
    seconds = max(answer.get("case_seconds", 0.0) for answer in answers)
    failed = [answer for answer in answers if "loss" not in answer]
    if failed:
        told = [f"rank {answer['rank']}: {answer['problem'].strip()}" for answer in failed if answer["problem"]]
        return Verdict(case, tuple(told), {}, seconds)
    problems = [problem for answer in answers for problem in _problems_of(case, answer)]
    return Verdict(case, tuple(problems), _figures(case, answers), seconds)


def _problems_of(case: Case, answer: Answer) -> list[str]:
    """What is wrong on one rank."""
    runs_per_block = 1 if case.recompute == "none" else 2
    checks = [
        _at_most("loss, relative error", answer["loss_error"] or 0.0, TOLERANCE),
        _at_most(f"gradient of {answer['worst_gradient']}, relative error", answer["gradient_error"], TOLERANCE),
        _all_are("executions per block", answer["blocks"], runs_per_block * case.micro_batches),
        _all_are("executions per excluded region", answer["excluded"], case.micro_batches),
        _all_are("messages left after the steps", [answer["pending"]], 0),
        _all_are("chunks held at most", [answer["peak_chunks"]], answer["expected_chunks"]),
        _near("bytes held at most", answer["peak_bytes"], answer["expected_bytes"]),
        _flat(*answer["live"]),
        "" if answer["repeats"] else "the last step differs from the first one: expected the same loss and gradients",
    ]
    return [f"rank {answer['rank']}: {check}" for check in checks if check]


def _at_most(what: str, seen: float, limit: float) -> str:
    return "" if seen <= limit else f"{what}: expected at most {limit:g}, saw {seen:.3g}"


def _all_are(what: str, seen: Sequence[int], expected: int) -> str:
    return "" if all(value == expected for value in seen) else f"{what}: expected {expected}, saw {list(seen)}"


def _near(what: str, seen: float, expected: float) -> str:
    if abs(seen - expected) <= MEMORY_TOLERANCE * max(expected, 1.0):
        return ""
    return f"{what}: expected {expected:.0f} as simulated, saw {seen:.0f}"


def _flat(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    grown = [
        f"{kind} {before.get(kind, 0)} -> {after.get(kind, 0)}"
        for kind in sorted({*before, *after})
        if before.get(kind, 0) != after.get(kind, 0)
    ]
    return f"objects alive after a step and after the next one: {', '.join(grown)}" if grown else ""


def _figures(case: Case, answers: Sequence[Answer]) -> dict[str, Any]:
    per_micro_batch = case.micro_batches
    return {
        "loss_error": max(answer["loss_error"] or 0.0 for answer in answers),
        "gradient_error": max(answer["gradient_error"] for answer in answers),
        "block_runs": max(max(answer["blocks"]) for answer in answers) / per_micro_batch,
        "excluded_runs": max(max(answer["excluded"], default=0) for answer in answers) / per_micro_batch,
        "peak_chunks": [answer["peak_chunks"] for answer in answers],
        "peak_bytes": [answer["peak_bytes"] for answer in answers],
        "step_seconds": max(answer["seconds"] for answer in answers),
        "time_ratio": max(answer["seconds"] for answer in answers) / answers[0]["reference_seconds"],
    }
