"""The multi-device regression matrix: schedule x ranks x stages per rank x recompute x exclusion x split x model.

    python scripts/regress.py --quick                     few cases that hold every pair of values
    python scripts/regress.py --full                      more of them, that hold every triple of values
    python scripts/regress.py --every                     every combination; takes hours
    python scripts/regress.py --full --filter 'zb-v/*/chain'
    python scripts/regress.py --full --part 1/4           a quarter of them; --part 2/4 is the next one
    python scripts/regress.py --quick --baseline old.json fail on what became worse

Each case runs on real workers and must give the loss and all gradients of one process (within 1e-6), run every block
once, or twice with recompute, and every excluded region once, hold as many chunks and bytes as the simulator says, and
leave nothing alive. Exit code 0: all passed; 1: something failed or became worse; 2: the command line is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench.report import environment
from scripts.regression import report as reports
from scripts.regression.baseline import regressions
from scripts.regression.cases import Case, all_cases, full_cases, quick_cases
from scripts.regression.jobs import run_cases
from scripts.regression.verdict import Verdict


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the selected cases, write the reports and return the exit code."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leave no worker behind
    cases = select(options)
    if not cases:
        print(f"No case is left by --filter {options.filter!r} and --part; see --list.", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    baseline = json.loads(options.baseline.read_text()) if options.baseline else None
    options.out.mkdir(parents=True, exist_ok=True)
    report = run(cases, options)
    if baseline is not None:
        report["regressions"] = regressions(report, baseline)
    reports.write_json(report, options.out / "regress.json")
    reports.write_junit(report, options.out / "regress.xml")
    reports.write_html(report, options.out / "regress.html")
    _tell(report, options.out)
    return 1 if report["failed"] or report["regressions"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    strength = parser.add_mutually_exclusive_group()
    strength.add_argument("--quick", action="store_true", help="few cases that hold every pair of values (the default)")
    strength.add_argument("--full", action="store_true", help="cases that hold every triple of values")
    strength.add_argument("--every", action="store_true", help="every combination; takes hours")
    parser.add_argument("--filter", metavar="PATTERN", help="only cases whose name matches, as '*/p4/*/chain/*'")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only the I-th of N equal parts")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="msrun jobs at a time (default 1)")
    parser.add_argument("--out", type=Path, default=Path("regress-report"), metavar="FOLDER", help="reports and logs")
    parser.add_argument(
        "--baseline", type=Path, metavar="FILE", help="an earlier regress.json: fail on what became worse"
    )
    return parser


def _part(text: str) -> tuple[int, int]:
    """Read I/N."""
    number, _, parts = text.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected a part such as 1/4, got {text!r}")
    return int(number), int(parts)


def select(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    cases = all_cases() if options.every else full_cases() if options.full else quick_cases()
    if options.filter:
        pattern = f"*{options.filter}*"
        cases = [case for case in cases if fnmatch.fnmatch(case.name, pattern)]
    number, parts = options.part
    return cases[number - 1 :: parts]


def run(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """Run the cases, telling how each one ended, and return the report."""
    console = Console(highlight=False)
    start = time.monotonic()
    verdicts: list[Verdict] = []
    for verdict in run_cases(cases, options.out / "jobs", options.jobs):
        verdicts.append(verdict)
        outcome = "[green]passed[/]" if verdict.passed else "[red]FAILED[/]"
        console.print(f"{len(verdicts):4}/{len(cases)} {outcome} {verdict.case.name} ({verdict.seconds:.1f} s)")
        for problem in verdict.problems:
            console.print(f"       {problem}", markup=False)
    strength = "every combination" if options.every else "full" if options.full else "quick"
    selection = f"{strength}, {len(cases)} cases"
    if options.filter:
        selection += f" that match {options.filter}"
    if options.part != (1, 1):
        selection += ", part {} of {}".format(*options.part)
    return reports.make_report(verdicts, selection, time.monotonic() - start, environment())


def _tell(report: reports.Report, folder: Path) -> None:
    for regression in report["regressions"]:
        print(f"worse than the baseline: {regression}")
    print(
        f"{report['failed']} failed, {report['passed']} passed, {len(report['regressions'])} worse than the baseline, "
        f"in {report['seconds']:.0f} s; see {folder / 'regress.html'}"
    )


if __name__ == "__main__":
    sys.exit(main())
