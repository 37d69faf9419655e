"""The cases of the matrix: what is left out, what quick covers, and that every case has a valid plan."""

from __future__ import annotations

import itertools

import pytest

from pipeline.plan import Kind, insert_communication, validate
from pipeline.plan.schedules import SCHEDULES
from scripts import regress
from scripts.regression.cases import QUICK_RANKS, Case, all_cases, full_cases, quick_cases


def pairs(case: Case) -> set:
    return set(itertools.combinations(enumerate(case), 2))


def kinds(case: Case) -> set[Kind]:
    return {part.kind for row in case.plan().rows for action in row for part in action.parts}


def test_quick_holds_every_pair_of_values_of_the_cases_with_its_ranks():
    wanted = set().union(*map(pairs, all_cases(QUICK_RANKS)))
    assert set().union(*map(pairs, quick_cases())) == wanted


def test_full_holds_every_triple_of_values():
    def triples(case: Case) -> set:
        return set(itertools.combinations(enumerate(case), 3))

    full = full_cases()
    assert set().union(*map(triples, full)) == set().union(*map(triples, all_cases()))
    assert len(set(full)) == len(full) < len(all_cases()) / 8


def test_quick_has_each_schedule_on_four_ranks_with_split_and_prefire_and_an_excluded_region():
    seen = {case.schedule for case in quick_cases() if case[1] == 4 and case[3:6] == ("prefire", "region", "split")}
    assert seen == set(SCHEDULES)


def test_quick_is_a_small_part_without_doubles():
    quick = quick_cases()
    assert len(set(quick)) == len(quick) < len(all_cases()) / 10


def test_nothing_is_excluded_where_nothing_is_replayed():
    assert all(case.exclusion == "none" for case in all_cases() if case.recompute == "none")


def test_names_can_be_read_back_and_differ():
    cases = all_cases()
    assert [Case.parse(case.name) for case in cases] == cases
    assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("case", quick_cases(), ids=lambda case: case.name)
def test_the_plan_of_a_case_is_valid_and_what_its_name_says(case):
    validate(insert_communication(case.plan()))
    assert (Kind.R in kinds(case)) == (case.recompute != "none")
    if case.split == "whole":
        assert not {Kind.I, Kind.W} & kinds(case)
    elif case.schedule != "dualpipe-v":  # its overlapped pairs keep a whole backward
        assert Kind.B not in kinds(case)


def test_list_prints_what_the_filter_leaves(capsys):
    assert regress.main(["--every", "--list", "--filter", "1f1b/p2/*/chain/whole/experts"]) == 0
    names = capsys.readouterr().out.split()
    assert names == [f"1f1b/p2/v1/{mode}/chain/whole/experts" for mode in ("lazy", "prefire", "ahead", "last")]


def test_parts_hold_every_case_once(capsys):
    parts = []
    for number in (1, 2, 3):
        assert regress.main(["--quick", "--list", "--part", f"{number}/3"]) == 0
        parts += capsys.readouterr().out.split()
    assert sorted(parts) == sorted(case.name for case in quick_cases())


def test_a_part_that_is_none_is_told(capsys):
    with pytest.raises(SystemExit):
        regress.main(["--part", "4/3"])
    assert "expected a part such as 1/4, got '4/3'" in capsys.readouterr().err


def test_a_filter_that_nothing_matches_is_told(capsys):
    assert regress.main(["--filter", "2f2b"]) == 2
    assert "No case is left by --filter '2f2b'" in capsys.readouterr().err
