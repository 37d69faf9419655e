"""Each thing that can be wrong with a case is told, and the reports and the baseline tell it on."""

from __future__ import annotations

import copy
import json
from xml.etree import ElementTree

import pytest

from scripts.regression import report as reports
from scripts.regression.baseline import regressions
from scripts.regression.cases import Case
from scripts.regression.verdict import Verdict, broken, judge

CASE = Case("zb-h1", 2, 1, "prefire", "region", "split", "mlp")


def answer(rank: int = 0, **changes) -> dict:
    good = {
        "case": CASE.name,
        "rank": rank,
        "problem": "",
        "loss": 1.0,
        "loss_error": 0.0,
        "gradient_error": 1e-7,
        "worst_gradient": "block0.up",
        "blocks": [8, 8],
        "excluded": [4, 4],
        "pending": 0,
        "peak_chunks": 2,
        "expected_chunks": 2,
        "peak_bytes": 4096,
        "expected_bytes": 4096.0,
        "live": [{"Tensor": 3}, {"Tensor": 3}],
        "repeats": True,
        "seconds": 0.5,
        "reference_seconds": 0.25,
        "case_seconds": 2.0,
    }
    return {**good, **changes}


def verdict(**changes) -> Verdict:
    return judge(CASE, [answer(0), answer(1, **changes)])


def test_a_good_case_passes_with_its_figures():
    good = verdict()
    assert good.passed
    assert good.figures["block_runs"] == 2 and good.figures["excluded_runs"] == 1
    assert good.figures["time_ratio"] == 2.0 and good.figures["peak_chunks"] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss_error": 2e-6}, "rank 1: loss, relative error: expected at most 1e-06, saw 2e-06"),
        ({"gradient_error": 0.1}, "rank 1: gradient of block0.up, relative error: expected at most 1e-06, saw 0.1"),
        ({"gradient_error": float("nan")}, "gradient of block0.up, relative error: expected at most 1e-06, saw nan"),
        ({"blocks": [8, 12]}, "rank 1: executions per block: expected 8, saw [8, 12]"),
        ({"excluded": [4, 8]}, "rank 1: executions per excluded region: expected 4, saw [4, 8]"),
        ({"pending": 1}, "rank 1: messages left after the steps: expected 0, saw [1]"),
        ({"peak_chunks": 3}, "rank 1: chunks held at most: expected 2, saw [3]"),
        ({"peak_bytes": 4200}, "rank 1: bytes held at most: expected 4096 as simulated, saw 4200"),
        (
            {"live": [{"Tensor": 3}, {"Tensor": 4}]},
            "rank 1: objects alive after a step and after the next one: Tensor 3 -> 4",
        ),
        ({"live": [{}, {"Session": 1}]}, "Session 0 -> 1"),
        ({"repeats": False}, "rank 1: the last step differs from the first one"),
    ],
)
def test_each_fault_is_told(changes, told):
    bad = verdict(**changes)
    assert len(bad.problems) == 1
    assert told in bad.problems[0]


def test_a_case_without_recompute_must_run_its_blocks_once():
    plain = CASE._replace(recompute="none", exclusion="none")
    assert judge(plain, [answer(blocks=[4, 4], excluded=[])] * 2).passed
    assert "expected 4, saw [8, 8]" in judge(plain, [answer(excluded=[])] * 2).problems[0]


def test_a_case_that_could_not_be_built_tells_the_rank_that_failed():
    answers = [{"case": CASE.name, "rank": 0, "problem": "", "case_seconds": 1.0}]
    answers.append(
        {"case": CASE.name, "rank": 1, "problem": "Traceback\nValueError: no such stage\n", "case_seconds": 1.0}
    )
    assert judge(CASE, answers).problems == ("rank 1: Traceback\nValueError: no such stage",)


@pytest.fixture
def report() -> dict:
    bad = broken(CASE._replace(model="experts"), "rank 1: killed <&> \x1b[31m", 3.0)
    return reports.make_report([verdict(), bad], "quick, 2 cases", 5.0, {"cores": 2})


def test_failures_come_first(report, tmp_path):
    reports.write_json(report, tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert [case["outcome"] for case in written["cases"]] == ["failed", "passed"]
    assert (written["failed"], written["passed"]) == (1, 1)


def test_junit_counts_and_quotes(report, tmp_path):
    reports.write_junit(report, tmp_path / "r.xml")
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    failures = [test.find("failure") for test in suite]
    assert failures[0].text == "rank 1: killed <&> [31m" and failures[1] is None


def test_junit_tells_a_regression_as_a_failed_test(report, tmp_path):
    report["regressions"] = ["zb-h1: slower"]
    reports.write_junit(report, tmp_path / "r.xml")
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert suite.get("failures") == "2"
    assert suite[-1].get("name") == "baseline" and suite[-1].find("failure").text == "zb-h1: slower"


def test_the_page_shows_failures_before_the_table_and_quotes_them(report, tmp_path):
    reports.write_html(report, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert page.index("killed &lt;&amp;&gt;") < page.index("All cases")
    assert "1 failed, 1 passed" in page


def passed_report() -> dict:
    return reports.make_report([verdict()], "quick, 1 case", 5.0, {})


def test_a_report_is_no_worse_than_itself():
    assert regressions(passed_report(), passed_report()) == []


@pytest.mark.parametrize(
    ("figure", "value", "told"),
    [
        ("block_runs", 3, "block_runs grew from 2 to 3"),
        ("excluded_runs", 2, "excluded_runs grew from 1 to 2"),
        ("peak_chunks", [2, 3], "rank 1: chunks held at most grew from 2 to 3"),
        ("peak_bytes", [4096, 4400], "rank 1: bytes held at most grew from 4096 to 4400"),
        ("time_ratio", 6.1, "step time over one process grew from 2.00 to 6.10"),
        ("time_ratio", 3.1, "all cases: the median step time over one process is 1.55 times the baseline's"),
    ],
)
def test_what_became_worse_is_told(figure, value, told):
    now = copy.deepcopy(passed_report())
    now["cases"][0]["figures"][figure] = value
    assert any(told in regression for regression in regressions(now, passed_report()))


@pytest.mark.parametrize(
    ("figure", "value"), [("peak_bytes", [4200, 4200]), ("time_ratio", 2.9), ("peak_chunks", [1, 1])]
)
def test_what_is_within_the_tolerance_or_better_is_not_told(figure, value):
    now = copy.deepcopy(passed_report())
    now["cases"][0]["figures"][figure] = value
    assert regressions(now, passed_report()) == []


def test_a_case_that_failed_now_and_passed_then_is_told():
    now = reports.make_report([broken(CASE, "hangs", 1.0)], "quick", 1.0, {})
    assert regressions(now, passed_report()) == [f"{CASE.name}: it passed in the baseline and does not now"]
