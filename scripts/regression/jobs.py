"""Runs cases in msrun jobs, one job for all cases of a number of ranks, and yields their verdicts.

A job starts slowly, so it runs many cases. A case that fails with messages under way, or that hangs, ends its job; the
rest of the cases goes into a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any, Optional

from pipeline.launch import Failure
from scripts.regression.cases import Case
from scripts.regression.verdict import Verdict, broken, judge
from scripts.workers import run_workers

WORKER = Path(__file__).with_name("worker.py")
SILENCE = 120.0
"""Seconds without an answer of any rank, start-up included, after which a case counts as hanging."""
JOBS_IN_VAIN = 3
"""After so many jobs in a row without a single answer, something other than the cases is wrong."""


def run_cases(cases: Sequence[Case], folder: Path, jobs: int = 1) -> Iterator[Verdict]:
    """Run all cases, with `jobs` msrun jobs at a time; logs and answers stay in `folder`.

    When the caller stops asking, the jobs that run are ended.
    """
    ordered = sorted(cases, key=lambda case: case.ranks)
    groups = [list(group) for _, group in groupby(ordered, key=lambda case: case.ranks)]
    verdicts: SimpleQueue[Optional[Verdict]] = SimpleQueue()
    stop = Event()
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(_run_group, group, folder, verdicts, stop) for group in groups]
        for done in running:
            done.add_done_callback(lambda _: verdicts.put(None))
        try:
            for _ in running:
                yield from iter(verdicts.get, None)
        finally:
            stop.set()
        for done in running:
            done.result()


class _StoppedError(Exception):
    """Nobody wants the verdicts any more."""


def _run_group(cases: Sequence[Case], folder: Path, verdicts: SimpleQueue[Optional[Verdict]], stop: Event) -> None:
    """Run the cases of one number of ranks, in as many jobs as it takes."""
    left, attempt, in_vain = list(cases), 0, 0
    while left and in_vain < JOBS_IN_VAIN:
        job = _Job(left, folder / f"ranks{left[0].ranks}-job{attempt}", verdicts, stop)
        left, attempt = job.run(), attempt + 1
        in_vain = 0 if job.answered else in_vain + 1
    for case in left:
        verdicts.put(broken(case, f"not run: the last {JOBS_IN_VAIN} jobs ended before their first case did", 0.0))


class _Job:
    """One msrun job. Verdicts are given as soon as all ranks have answered a case."""

    def __init__(
        self, cases: Sequence[Case], folder: Path, verdicts: SimpleQueue[Optional[Verdict]], stop: Event
    ) -> None:
        self._cases = cases
        self._folder = folder
        self._verdicts = verdicts
        self._stop = stop
        self._judged = 0
        self._since = time.monotonic()

    @property
    def answered(self) -> bool:
        """Whether all ranks answered at least one case."""
        return self._judged > 0

    def run(self) -> list[Case]:
        """Run the job, and return the cases that it did not get to."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("answers.rank*.jsonl"):
            old.unlink()
        file = self._folder / "cases.json"
        file.write_text(json.dumps([case.name for case in self._cases]))
        ranks = self._cases[0].ranks
        failure = run_workers(WORKER, ranks, self._folder, [str(file)], SILENCE, progress=self._judge_new)
        self._judge_new()
        if self._judged == len(self._cases):
            return []
        failed = self._cases[self._judged]
        reason = str(failure or Failure(None, "ended early", "the workers ended without an answer", log=self._folder))
        self._verdicts.put(broken(failed, reason, time.monotonic() - self._since))
        return list(self._cases[self._judged + 1 :])

    def _judge_new(self) -> int:
        """Judge the cases that all ranks have answered since the last look; returns how many answers there are."""
        if self._stop.is_set():
            raise _StoppedError
        answers = [self._answers_of(rank) for rank in range(self._cases[0].ranks)]
        for given in list(zip(*answers))[self._judged :]:
            self._verdicts.put(judge(self._cases[self._judged], given))
            self._judged += 1
            self._since = time.monotonic()
        return sum(map(len, answers))

    def _answers_of(self, rank: int) -> list[dict[str, Any]]:
        """The whole lines of a rank's file; the last one may still be under way."""
        file = self._folder / f"answers.rank{rank}.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]]
