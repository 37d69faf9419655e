"""The text form of an action: exact both ways, and strict."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.plan import Action, Kind, PlanError

numbers = st.integers(0, 10**6)
simple_kinds = st.sampled_from([kind for kind in Kind if kind is not Kind.OVERLAP_F_B])


NO_BLOCKS = st.none()


def actions(kinds, last_blocks=NO_BLOCKS):
    """Actions without parts."""
    return st.builds(Action, numbers, kinds, numbers, st.just(()), last_blocks)


simple = st.one_of(actions(simple_kinds), actions(st.just(Kind.R), st.integers(0, 99)))
pairs = st.builds(Action.overlap, actions(st.just(Kind.F)), actions(st.sampled_from([Kind.B, Kind.I])))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F0", Action(0, Kind.F, 0)),
        ("12B34", Action(12, Kind.B, 34)),
        ("3I1", Action(3, Kind.I, 1)),
        ("3W1", Action(3, Kind.W, 1)),
        ("2R0", Action(2, Kind.R, 0)),
        ("2R0:3", Action(2, Kind.R, 0, (), 3)),
        ("2R0:0", Action(2, Kind.R, 0, (), 0)),
        ("2SEND_F0", Action(2, Kind.SEND_F, 0)),
        ("2RECV_B11", Action(2, Kind.RECV_B, 11)),
        ("(0F1;3B2)OVERLAP_F_B", Action(0, Kind.OVERLAP_F_B, 1, (Action(0, Kind.F, 1), Action(3, Kind.B, 2)))),
        ("(0F1;3I2)OVERLAP_F_B", Action(0, Kind.OVERLAP_F_B, 1, (Action(0, Kind.F, 1), Action(3, Kind.I, 2)))),
    ],
)
def test_text_and_action_are_the_same_thing(text, action):
    assert Action.parse(text) == action
    assert Action.parse(f"  {text} ") == action
    assert str(action) == text


@given(st.one_of(simple, pairs))
def test_every_action_is_read_back_from_its_text(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "F", "0", "0F", "F0", "0F0x", "0F-1", "-1F0", "0f0", "0X0", "0 F0", "0F0 1B0", "0F0;1B0", "0FF0"),
        *("0SENDF0", "0SEND_F", "SEND_F0", "0SEND_I0", "0RECV_W0", "0OVERLAP_F_B0", "0UNSHARD", "٣F0", "0F²", "0F0\n1"),
        *("0R0:", "0R0:-1", "0R0:x", "0F0:1", "0B0:1", "0R0:1:2"),
        *("(0F1;3B2)", "(0F1)OVERLAP_F_B", "(;)OVERLAP_F_B", "(0F1;3B2OVERLAP_F_B", "0F1;3B2)OVERLAP_F_B"),
        *("(0F1;3B2;1F1)OVERLAP_F_B", "((0F1;3B2)OVERLAP_F_B;1B0)OVERLAP_F_B", "(0F1;3B2)OVERLAP_F_B1"),
    ],
)  # fmt: skip
def test_text_that_is_no_action_is_an_error_that_shows_it(text):
    with pytest.raises(PlanError, match="expected an action such as 0F0") as raised:
        Action.parse(text)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["(3B2;0F1)OVERLAP_F_B", "(0F1;0F2)OVERLAP_F_B", "(0F1;0W1)OVERLAP_F_B"])
def test_a_pair_is_a_forward_and_a_backward(text):
    with pytest.raises(PlanError, match="expected a forward and a backward in an overlapped pair, saw "):
        Action.parse(text)


@given(st.text(alphabet="0123FRBIW_SENDC:;() \t", max_size=14))
def test_what_is_read_is_written_the_same_but_for_spaces_and_leading_zeros(text):
    try:
        action = Action.parse(text)
    except PlanError:
        return
    assert Action.parse(str(action)) == action
    assert [piece for piece in str(action) if not piece.isdigit()] == [
        piece for piece in text if not (piece.isdigit() or piece.isspace())
    ]


def test_parts_of_an_action():
    pair = Action.parse("(0F1;3B2)OVERLAP_F_B")
    assert [str(part) for part in pair.parts] == ["0F1", "3B2"]
    assert Action.parse("0F1").parts == (Action.parse("0F1"),)
