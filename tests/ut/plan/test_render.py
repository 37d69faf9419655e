"""Pictures of plans: what is in them, not how they look."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from pipeline.plan import Action, Communication, Costs, Event, Kind, Memory, PlanError, make_plan, simulate
from pipeline.plan.passes import insert_communication, insert_recompute
from pipeline.plan.render import Timeline, chrome_trace, save_picture, simulated, text_boxes, text_grid
from pipeline.plan.render.picture import COLOURS, shade


def timeline_of(name="1f1b", ranks=4, micro_batches=8, **kwargs):
    return simulated(simulate(make_plan(name, ranks, micro_batches), **kwargs), name)


def overlapped() -> Timeline:
    pair = Action.overlap(Action.parse("0F1"), Action.parse("1B0"))
    return Timeline("pairs", [[Event(Action.parse("0F0"), 0.0, 1.0), Event(pair, 1.0, 3.0)]])


def test_text_grid_shows_every_action_and_the_idle_time():
    assert text_grid(timeline_of(ranks=2, micro_batches=2)) == (
        "rank 0 F0 F1 ......B0    ...B1    \n"
        "rank 1 ...F0 B0    F1 B1    ......"
    )  # fmt: skip


def test_text_grid_names_the_stage_where_a_rank_has_several():
    events = [[Event(Action.parse(text), time, time + 1.0) for time, text in enumerate(("0F0", "1F0", "1B0", "0B0"))]]
    assert text_grid(Timeline("two stages", events)) == "rank 0 0F0 1F0 1B0 0B0 "


def test_text_grid_shows_both_parts_of_a_pair():
    assert "0F1+1B0" in text_grid(overlapped())


@pytest.mark.parametrize("columns", [20, 37, 60, 500])
def test_panels_put_side_by_side_are_the_wide_grid(columns):
    timeline = timeline_of(costs=Costs(forward=[0.7, 1.0, 1.3, 0.4]))
    wide = text_grid(timeline).splitlines()
    narrow = text_grid(timeline, columns).splitlines()
    assert max(map(len, narrow)) <= columns
    for rank, line in enumerate(wide):
        pieces = [piece[len("rank 0 ") :] for piece in narrow[rank :: timeline.ranks + 1]]
        assert "rank 0 "[:5] + f"{rank} " + "".join(pieces) == line


def test_text_width_is_bounded_when_actions_differ_wildly_in_length():
    grid = text_grid(timeline_of(costs=Costs(forward=1e-6)))
    assert max(map(len, grid.splitlines())) < 4100


def test_boxes_keep_the_kind_for_colours():
    kinds = {box.kind for line in text_boxes(timeline_of()) for box in line}
    assert kinds == {None, Kind.F, Kind.B}


def test_json_form_round_trips():
    timeline = timeline_of(costs=Costs(communication=Communication(latency=0.3)))
    again = Timeline.from_json(timeline.to_json())
    assert again.events == [list(row) for row in timeline.events]
    assert again.memory == [list(curve) for curve in timeline.memory]
    assert (again.name, again.unit) == ("1f1b", "")


def test_a_measured_trace_starts_at_zero_in_order_and_may_have_more_fields():
    rows = [
        [{"action": "0B0", "start": 12.0, "end": 14.0}, {"action": "0F0", "start": 10.5, "end": 11.5, "waiting": 9}]
    ]
    timeline = Timeline.from_json(json.dumps({"name": "run", "unit": "s", "events": rows, "memory": [[[10.5, 3]]]}))
    assert [(str(event.action), event.start, event.end) for event in timeline.events[0]] == [
        ("0F0", 0.0, 1.0),
        ("0B0", 1.5, 3.5),
    ]
    assert timeline.memory == [[(0.0, 3.0)]]
    assert Timeline.from_json(json.dumps(rows)).events == timeline.events


@pytest.mark.parametrize(
    "text",
    ["", "7", "{}", '{"events": [[{"action": "0F0"}]]}', '{"events": [[{"action": "0Q0", "start": 0, "end": 1}]]}'],
)
def test_a_trace_of_another_form_is_an_error_that_shows_the_form(text):
    with pytest.raises(PlanError, match=r'expected a trace such as \{"events"'):
        Timeline.from_json(text)


def test_svg_has_a_box_per_action_in_the_colour_of_its_kind(tmp_path):
    plan = insert_recompute(make_plan("1f1b", 3, 5), "prefire")
    file = tmp_path / "plan.svg"
    save_picture([simulated(simulate(plan, Costs(recompute=1.0)), "1f1b")], file)
    text = file.read_text()
    xml.etree.ElementTree.fromstring(text)
    for kind in (Kind.F, Kind.R, Kind.B):
        assert text.count(f"fill: {COLOURS[kind]}") == 3 * 5 + 1, f"boxes of {kind} and one in the legend"
    assert text.count("fill: #ececec") == 3 + 1
    assert f"fill: {COLOURS[Kind.W]}" not in text
    for words in ("rank 2", "memory", "bubble", "time"):
        assert f"<!-- {words}" in text


def test_svg_draws_both_parts_of_a_pair(tmp_path):
    save_picture([overlapped()], tmp_path / "pair.svg")
    text = (tmp_path / "pair.svg").read_text()
    assert text.count(f"fill: {COLOURS[Kind.F]}") == 2 + 1, "two boxes and the legend"
    assert text.count(f"fill: {shade(COLOURS[Kind.B], 1, 2)}") == 1, "one box of the rank's second stage"
    assert "<!-- memory" not in text


def test_a_measured_trace_stands_below_the_simulated_one(tmp_path):
    first = timeline_of(ranks=2, micro_batches=2)
    second = Timeline.from_json(first.to_json())
    save_picture([first, Timeline("measured", second.events, second.memory, "s")], tmp_path / "both.svg", 1.5)
    text = (tmp_path / "both.svg").read_text()
    assert text.index("<!-- 1f1b -->") < text.index("<!-- measured -->")
    assert "<!-- time (s) -->" in text
    assert "<!-- limit -->" in text


def test_the_same_plan_gives_the_same_file(tmp_path):
    for name in ("a.svg", "b.svg"):
        save_picture([timeline_of(ranks=2, micro_batches=2)], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_png_is_written(tmp_path):
    plan = insert_communication(make_plan("1f1b", 2, 3))
    costs = Costs(communication=Communication(latency=0.5))
    save_picture([simulated(simulate(plan, costs), "1f1b")], tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_other_endings_and_empty_timelines_are_errors(tmp_path):
    with pytest.raises(PlanError, match=r"expected a picture file that ends in \.svg or \.png, saw 'plan\.gif'"):
        save_picture([timeline_of()], tmp_path / "plan.gif")
    with pytest.raises(PlanError, match="at least one action that takes time"):
        save_picture([Timeline("empty", [[], []])], tmp_path / "plan.svg")


def test_chrome_trace_has_every_event_as_a_complete_one():
    simulation = simulate(make_plan("gpipe", 2, 3), memory=Memory(activation=2.0))
    measured = Timeline("measured", simulation.events, unit="s")
    events = json.loads(chrome_trace([simulated(simulation, "simulated"), measured]))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    for process, unit in ((0, 1e3), (1, 1e6)):
        for rank, row in enumerate(simulation.events):
            seen = [(e["name"], e["ts"], e["dur"]) for e in complete if (e["pid"], e["tid"]) == (process, rank)]
            assert seen == [(str(e.action), e.start * unit, (e.end - e.start) * unit) for e in row]
    held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["name"] == "memory of rank 1"]
    assert max(held) == simulation.peak_memory[1] == 6.0
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"simulated", "measured"}


def test_neither_matplotlib_nor_mindspore_is_imported_before_a_picture_is_drawn():
    code = (
        "import sys, pipeline.plan.render, pipeline.plan.search\n"
        "assert not {'matplotlib', 'mindspore', 'numpy', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
