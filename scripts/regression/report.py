"""The matrix's results as JSON, as JUnit XML, and as a page that shows failures first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2

from scripts.regression.verdict import Verdict

TEMPLATE = Path(__file__).with_name("report.html.j2")

Report = Mapping[str, Any]


def make_report(
    verdicts: Sequence[Verdict], selection: str, seconds: float, environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Gather everything in plain values, failures first.

    Args:
        verdicts: of all cases that ran.
        selection: what was asked for, in words.
        seconds: how long the whole run took.
        environment: what it ran on.
    """
    ordered = sorted(verdicts, key=lambda verdict: (verdict.passed, verdict.case))
    return {
        "selection": selection,
        "seconds": seconds,
        "environment": dict(environment),
        "passed": sum(verdict.passed for verdict in verdicts),
        "failed": sum(not verdict.passed for verdict in verdicts),
        "regressions": [],
        "cases": [verdict.to_row() for verdict in ordered],
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report as JSON; `--baseline` reads it."""
    path.write_text(json.dumps(report, indent=1) + "\n")


def write_junit(report: Report, path: Path) -> None:
    """Write the report as JUnit XML: a test per case, and one for the comparison with the baseline if that failed."""
    failures = report["failed"] + bool(report["regressions"])
    counts = {"tests": len(report["cases"]) + bool(report["regressions"]), "failures": failures}
    suite = ElementTree.Element(
        "testsuite", name="regress", time=f"{report['seconds']:.3f}", **{name: str(n) for name, n in counts.items()}
    )
    for case in report["cases"]:
        group = f"regress.{case['model']}.ranks{case['ranks']}"
        _add_test(suite, group, case["name"], case["seconds"], case["problems"])
    if report["regressions"]:
        _add_test(suite, "regress", "baseline", 0.0, report["regressions"])
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def _add_test(suite: ElementTree.Element, group: str, name: str, seconds: float, problems: Sequence[str]) -> None:
    test = ElementTree.SubElement(suite, "testcase", classname=group, name=name, time=f"{seconds:.3f}")
    if problems:
        first_line = problems[0].splitlines()[-1]
        ElementTree.SubElement(test, "failure", message=_printable(first_line)).text = _printable("\n".join(problems))


def _printable(text: str) -> str:
    """The text without the control characters that XML cannot hold."""
    return "".join(character for character in text if character.isprintable() or character in "\n\t")


def write_html(report: Report, path: Path) -> None:
    """Write the report as one page without any other file."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    path.write_text(environment.from_string(TEMPLATE.read_text()).render(report), encoding="utf-8")
