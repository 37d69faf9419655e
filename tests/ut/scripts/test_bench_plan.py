"""The benches of plans, with tiny sizes: what they print and when they fail."""

from __future__ import annotations

import json
import sys

from scripts.bench import auto_search, plan_speed


def run(monkeypatch, capsys, bench, *arguments):
    """(exit code, JSON) of a bench."""
    monkeypatch.setattr(sys, "argv", [bench.__name__, *arguments, "--json"])
    code = bench.main()
    return code, json.loads(capsys.readouterr().out)


def test_plan_speed_measures_and_holds_to_the_limits(monkeypatch, capsys):
    monkeypatch.setattr(plan_speed, "IMPORT_LIMIT", 600.0)
    monkeypatch.setattr(plan_speed, "SIZES", ((2, 4, 600.0, 1e6), (2, 4, 600.0, 1.0)))
    code, rows = run(monkeypatch, capsys, plan_speed, "--schedule", "zb-h1")
    assert code == 1
    assert [row["passed"] for row in rows] == [True, True, False]
    assert rows[1]["what"] == "zb-h1, 2 ranks, 4 micro-batches"
    assert 0 < rows[1]["simulate_seconds"] < rows[1]["seconds"]
    assert rows[2]["mib"] > 1


def test_auto_search_compares_with_the_best_named_schedule(monkeypatch, capsys):
    arguments = ["--sets", "2", "--ranks", "2", "--micro-batches", "4", "--limits", "0.2,1", "--effort", "0.02"]
    code, found = run(monkeypatch, capsys, auto_search, *arguments)
    assert code == 0
    assert found["total"]["searches"] == len(found["rows"]) == 4
    assert found["total"]["never_worse"]
    for row in found["rows"]:
        if row["named"]:
            assert row["makespan"] <= row["named_makespan"]
            assert row["gain"] == 1 - row["makespan"] / row["named_makespan"]
