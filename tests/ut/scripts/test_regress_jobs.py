"""A case that ends its job is blamed, the others still run; a job that never gets anywhere is not started for ever."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.launch import Failure
from scripts.regression import jobs
from scripts.regression.cases import Case
from tests.ut.scripts.test_regress_verdict import answer

CASES = [Case("1f1b", 2, 1, mode, "none", "split", "mlp") for mode in ("lazy", "prefire", "ahead", "last")]


class FakeWorkers:
    """In place of msrun: answers every case of a job until one that is told to fail."""

    def __init__(self, failing: set[str]) -> None:
        self.failing = failing
        self.jobs: list[list[str]] = []

    def __call__(self, script, ranks, folder, arguments, silence, progress):
        names = json.loads(Path(arguments[0]).read_text())
        self.jobs.append(names)
        for name in names:
            if name in self.failing:
                self._write(folder, ranks - 1, name)
                return Failure(0, "RuntimeError", f"{name} broke")
            for rank in range(ranks):
                self._write(folder, rank, name)
            progress()
        return None

    @staticmethod
    def _write(folder: Path, ranks: int, name: str) -> None:
        with (folder / f"answers.rank{ranks}.jsonl").open("a") as file:
            file.write(json.dumps(answer(ranks, case=name, excluded=[])) + "\n")


def run(monkeypatch, folder: Path, failing: set[str], cases=CASES) -> tuple[FakeWorkers, dict]:
    workers = FakeWorkers(failing)
    monkeypatch.setattr(jobs, "run_workers", workers)
    return workers, {verdict.case.name: verdict for verdict in jobs.run_cases(cases, folder)}


def test_all_cases_of_a_number_of_ranks_go_into_one_job(monkeypatch, tmp_path):
    workers, verdicts = run(monkeypatch, tmp_path, set())
    assert workers.jobs == [[case.name for case in CASES]]
    assert all(verdict.passed for verdict in verdicts.values())


def test_the_case_that_ended_the_job_is_blamed_and_the_rest_goes_into_a_new_one(monkeypatch, tmp_path):
    names = [case.name for case in CASES]
    workers, verdicts = run(monkeypatch, tmp_path, {names[1]})
    assert workers.jobs == [names, names[2:]]
    assert [verdicts[name].passed for name in names] == [True, False, True, True]
    assert verdicts[names[1]].problems == (f"rank 0: RuntimeError: {names[1]} broke",)


def test_jobs_that_get_nowhere_are_given_up(monkeypatch, tmp_path):
    names = [case.name for case in CASES]
    workers, verdicts = run(monkeypatch, tmp_path, set(names))
    assert len(workers.jobs) == jobs.JOBS_IN_VAIN == 3
    assert "not run: the last 3 jobs ended" in verdicts[names[3]].problems[0]


def test_ranks_have_jobs_of_their_own(monkeypatch, tmp_path):
    both = [CASES[0], CASES[0]._replace(ranks=4)]
    workers, verdicts = run(monkeypatch, tmp_path, set(), both)
    assert workers.jobs == [[both[0].name], [both[1].name]]
    assert set(verdicts) == {case.name for case in both}


def test_a_job_is_ended_when_nobody_asks_for_verdicts_any_more(monkeypatch, tmp_path):
    ended = []

    def endless(script, ranks, folder, arguments, silence, progress):
        try:
            for name in json.loads(Path(arguments[0]).read_text()):
                for rank in range(ranks):
                    FakeWorkers._write(folder, rank, name)
                progress()
            while True:
                progress()
        finally:
            ended.append(True)

    monkeypatch.setattr(jobs, "run_workers", endless)
    verdicts = jobs.run_cases(CASES, tmp_path)
    next(verdicts)
    verdicts.close()
    assert ended == [True]


def test_a_line_that_is_not_finished_is_not_read(tmp_path):
    (tmp_path / "answers.rank0.jsonl").write_text(json.dumps(answer()) + "\n" + '{"case": "half')
    job = jobs._Job(CASES, tmp_path, None, None)
    assert len(job._answers_of(0)) == 1
