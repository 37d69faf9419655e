"""The plan commands of ``python -m pipeline``: options, JSON fields, exit codes, messages."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pipeline.cli import main
from pipeline.commands import compare
from pipeline.plan import Costs, Memory, Plan, PlanError, make_plan, simulate
from pipeline.plan.cost_file import read_cost_file, read_cost_text, recut
from pipeline.plan.passes import insert_recompute, limit_pending_weight, split_backward
from pipeline.plan.render import simulated

SIZES = ["--ranks", "4", "--micro-batches", "8"]
SMALL = ["--ranks", "2", "--micro-batches", "2"]
FIELDS = ["makespan", "bubble", "span_bubble", "busy", "peak_activations", "peak_memory", "plan_actions"]


def run(capsys, *arguments):
    """(exit code, standard output, standard error) of a command."""
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def json_of(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_plan_prints_the_csv_that_reads_back(capsys):
    code, out, _ = run(capsys, "plan", "--schedule", "1f1b", *SIZES)
    assert code == 0
    assert Plan.from_csv(out).rows == make_plan("1f1b", 4, 8).rows


def test_plan_json_has_rows_and_digest(capsys):
    content = json_of(capsys, "plan", "--schedule", "gpipe", *SMALL)
    assert content["rows"] == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    assert content["placement"] == [0, 1]
    assert content["digest"] == make_plan("gpipe", 2, 2).digest()


def test_simulate_json_has_the_promised_fields(capsys):
    content = json_of(capsys, "simulate", "--schedule", "1f1b", *SIZES)
    assert set(FIELDS) <= set(content)
    assert (content["makespan"], content["bubble"], content["span_bubble"]) == (33.0, 9.0, 9.0)
    assert content["busy"] == [24.0] * 4
    assert content["peak_activations"] == content["peak_memory"] == [4, 3, 2, 1]
    assert content["plan_actions"] == 64


@pytest.mark.parametrize(("mode", "makespan"), [("none", 33.0), ("lazy", 44.0), ("prefire", 41.0)])
def test_recompute_modes_cost_what_the_formulas_say(capsys, mode, makespan):
    """Lazy: (m + p - 1)(f + b + w + r); pre-fired: (p - 1) r less."""
    options = ["--cost", "r=1", "--recompute", mode]
    assert json_of(capsys, "simulate", "--schedule", "1f1b", *SIZES, *options)["makespan"] == makespan


def test_cost_letters_and_memory_limit(capsys):
    options = ["--cost", "f=2,b=3,w=1,r=1,c=0.5,a=4,i=1,e=0.5", "--recompute", "prefire", "--memory-limit", "7.9"]
    content = json_of(capsys, "simulate", "--schedule", "1f1b", *SIZES, *options)
    model = read_cost_text("f=2,b=3,w=1,r=1,c=0.5,a=4,i=1,e=0.5")
    expected = simulate(insert_recompute(make_plan("1f1b", 4, 8), "prefire"), model.costs, model.memory)
    assert content["makespan"] == expected.makespan
    assert content["peak_memory"] == expected.peak_memory
    assert content["within_memory_limit"] == (max(expected.peak_memory) <= 7.9)


def test_lead_and_pending_weight_are_passes(capsys, tmp_path):
    split = split_backward(make_plan("1f1b", 4, 8))
    file = tmp_path / "split.csv"
    file.write_text(split.to_csv())
    options = ["--recompute", "prefire", "--lead", "3", "--max-pending-weight", "2"]
    content = json_of(capsys, "plan", "--csv", str(file), *options)
    expected = insert_recompute(limit_pending_weight(split, 2), "prefire", 3)
    assert content["digest"] == expected.digest()


def test_a_written_plan_is_read_back_and_valid(capsys, tmp_path):
    file = str(tmp_path / "plan.csv")
    assert run(capsys, "plan", "--schedule", "1f1b", *SIZES, "--csv", file) == (0, "", "")
    assert json_of(capsys, "simulate", "--csv", file)["makespan"] == 33.0
    code, out, _ = run(capsys, "validate", file)
    assert (code, out) == (0, "valid: 4 ranks, 4 stages, 8 micro-batches\n")


def test_validate_tells_every_fault_and_exits_1(capsys, tmp_path):
    file = tmp_path / "wrong.csv"
    file.write_text("0F0,0B0,0B0\n1F0,1F1,1F1,1B0\n")
    code, out, _ = run(capsys, "validate", str(file))
    assert code == 1
    assert "rank 0, position 2, 0B0: 0B0 is there twice" in out
    assert "rank 1, position 2, 1F1: 1F1 is there twice" in out
    code, out, _ = run(capsys, "validate", str(file), "--json")
    content = json.loads(out)
    assert code == 1
    assert not content["valid"]
    assert {"rank": 0, "position": 2, "action": "0B0", "reason": "0B0 is there twice"} in content["faults"]


def test_validate_tells_every_cell_that_cannot_be_read(capsys, tmp_path):
    file = tmp_path / "unreadable.csv"
    file.write_text("0F0x,0B0\n1F0,zz\n")
    code, out, _ = run(capsys, "validate", str(file))
    assert code == 1
    assert "row 0, cell 0: expected an action" in out
    assert "row 1, cell 1: expected an action" in out
    assert "2 faults" in out


def test_validate_finds_a_micro_batch_that_is_missing_altogether(capsys, tmp_path):
    file = tmp_path / "short.csv"
    file.write_text(make_plan("1f1b", 2, 3).to_csv())
    assert run(capsys, "validate", str(file), "--micro-batches", "4")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate"], "expected --schedule NAME, or --csv FILE with a plan to read, saw neither"),
        (["simulate", "--schedule", "2f2b", *SIZES], "dualpipe-v, auto for --schedule, saw '2f2b'"),
        (["compare", "--schedule", "1f1b,2f2b", *SIZES], "dualpipe-v, auto for --schedule, saw '2f2b'"),
        (["plan", "--schedule", "1f1b", "--ranks", "4"], "expected --micro-batches with --schedule, saw none"),
        (
            ["plan", "--schedule", "1f1b", "--ranks", "0", "--micro-batches", "4"],
            "at least 1 for ranks, saw 0",
        ),
        (["plan", "--schedule", "1f1b", *SIZES, "--virtual", "2"], "expected 1 stages per rank"),
        (["simulate", "--schedule", "1f1b", *SIZES, "--cost", "q=1"], "expected costs such as f=1,b=1"),
        (
            ["simulate", "--schedule", "1f1b", *SIZES, "--cost", "f=x"],
            "a number after f= in the costs, saw 'x'",
        ),
        (["simulate", "--schedule", "1f1b", *SIZES, "--cost", "f=-1"], "expected numbers from 0 up for forward"),
        (["simulate", "--schedule", "1f1b", *SIZES, "--recompute", "all"], "expected --recompute none|lazy|prefire"),
        (["simulate", "--schedule", "1f1b", *SIZES, "--recompute", "prefire", "--lead", "0"], "a lead of at least 1"),
        (["simulate", "--schedule", "1f1b", *SIZES, "--lead", "2"], "--lead together with --recompute prefire, saw"),
        (["simulate", "--schedule", "1f1b", *SIZES, "--memory-limit", "0"], "expected a --memory-limit above 0, saw 0"),
        (["compare", *SIZES, "--memory-limit", "4,-1"], "expected a --memory-limit above 0, saw -1"),
        (
            ["simulate", "--schedule", "1f1b", *SIZES, "--cost", "f=inf"],
            "expected finite numbers from 0 up for forward",
        ),
        (["simulate", "--schedule", "1f1b", *SIZES, "--cost", "b=nan"], "finite numbers from 0 up for backward_input"),
        (["simulate", "--schedule", "1f1b", *SIZES, "--cost", "c=inf"], "expected a finite latency from 0 up, saw inf"),
        (["simulate", "--csv", "nowhere.csv"], "expected a file that can be opened, saw 'nowhere.csv'"),
        (["validate", "nowhere.csv"], "expected a file that can be opened, saw 'nowhere.csv'"),
        (["render", "--schedule", "1f1b", *SIZES, "--out", "plan.gif"], r"ends in .svg, .png or .json, saw 'plan.gif'"),
        (
            ["plan", "--schedule", "auto", *SIZES, "--lead", "2"],
            "expected auto without --lead",
        ),
        (["plan", "--schedule", "auto", *SIZES, "--memory-limit", "0.5"], "expected a memory limit that some plan"),
        (["compare", "--ranks", "4"], "expected --micro-batches, saw none"),
        (["compare", *SIZES, "--out", "table.svg"], "ends in .json for a comparison, saw 'table.svg'"),
        (["compare", *SIZES, "--recompute", "none,all"], "expected --recompute none|lazy|prefire, saw 'all'"),
    ],
)
def test_wrong_options_exit_with_2_and_one_sentence(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_argparse_errors_exit_with_2_too(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "--ranks", "four"])
    assert stopped.value.code == 2
    assert "invalid int value: 'four'" in capsys.readouterr().err


def test_simulate_prints_a_table_with_ranks_over_the_limit(capsys):
    code, out, _ = run(capsys, "simulate", "--schedule", "1f1b", *SIZES, "--memory-limit", "2.5")
    assert code == 0
    assert "1f1b: makespan 33" in out
    assert out.count("over the limit") == 2


def test_compare_sweeps_sizes_and_limits_fastest_first(capsys):
    options = ["--ranks", "2,4", "--micro-batches", "4,8", "--memory-limit", "2,100", "--schedule", "gpipe,1f1b"]
    rows = json_of(capsys, "compare", *options, "--cost", "r=1,i=0.1")["rows"]
    assert len(rows) == 2 * 2 * 2 * 2 * 3
    groups = {}
    for row in rows:
        groups.setdefault((row["ranks"], row["micro_batches"], row["memory_limit"]), []).append(row)
    assert list(groups) == [(p, m, x) for p in (2, 4) for m in (4, 8) for x in (2.0, 100.0)]
    for group in groups.values():
        fitting = [row["makespan"] for row in group if row["within_memory_limit"]]
        assert fitting == sorted(fitting)
        assert [row["within_memory_limit"] for row in group] == sorted(
            (row["within_memory_limit"] for row in group), reverse=True
        )


def test_compare_keeps_the_model_the_same_for_more_stages_per_rank(capsys):
    """Every schedule does the same work, however it cuts the model."""
    rows = json_of(capsys, "compare", *SIZES, "--recompute", "none")["rows"]
    assert {round(row["makespan"] - row["bubble"], 9) for row in rows} == {8 * 3.0}


def test_compare_table_and_files(capsys, tmp_path):
    table, content = tmp_path / "table.csv", tmp_path / "table.json"
    options = ["--schedule", "1f1b,auto", "--memory-limit", "1.5,3", "--recompute", "none"]
    code, out, _ = run(
        capsys, "compare", "--ranks", "2", "--micro-batches", "4", *options, "--csv", str(table), "--out", str(content)
    )
    assert code == 0
    assert "2 ranks, 4 micro-batches, memory limit 1.5" in out
    assert table.read_text().splitlines()[0].startswith("ranks,micro_batches,memory_limit,schedule")
    rows = json.loads(content.read_text())["rows"]
    assert len(rows) == 4
    assert [row["schedule"] for row in rows if row["memory_limit"] == 3.0] == ["auto", "1f1b"]


def test_compare_says_where_auto_finds_nothing(capsys):
    code, out, _ = run(capsys, "compare", *SIZES, "--schedule", "auto", "--memory-limit", "0.1", "--recompute", "none")
    assert code == 0
    assert "none within the limit" in out


def test_auto_tells_what_it_gained(capsys, tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"f": [1, 2, 1], "b": [1, 2, 1], "w": 1, "memory": {"activation": 2}}))
    options = ["--ranks", "3", "--micro-batches", "5", "--cost-file", str(file), "--memory-limit", "6"]
    code, out, err = run(capsys, "simulate", "--schedule", "auto", *options, "--json")
    assert code == 0
    assert "% less than" in err
    named = json_of(capsys, "simulate", "--schedule", "1f1b", *options)
    assert json.loads(out)["makespan"] <= named["makespan"]
    assert json.loads(out)["within_memory_limit"]


def test_render_prints_a_grid_or_json_or_writes_files(capsys, tmp_path):
    code, out, _ = run(capsys, "render", "--schedule", "gpipe", *SMALL)
    assert code == 0
    assert "rank 1 ...F0 F1 B0    B1    ......" in out
    measured = tmp_path / "measured.json"
    measured.write_text(simulated(simulate(make_plan("gpipe", 2, 2)), "a run", "s").to_json())
    both = json_of(capsys, "render", "--schedule", "gpipe", *SMALL, "--measured", str(measured))
    assert [timeline["unit"] for timeline in both] == ["", "s"]
    assert both[0]["events"] == both[1]["events"]
    trace = tmp_path / "trace.json"
    assert run(capsys, "render", "--measured", str(measured), "--out", str(trace)) == (0, "", "")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0F0", "1B1"} <= names
    for name in ("picture.svg", "picture.png"):
        file = tmp_path / name
        assert (
            run(capsys, "render", "--schedule", "1f1b", *SIZES, "--measured", str(measured), "--out", str(file))[0] == 0
        )
        assert file.stat().st_size > 1000


def test_cost_file_is_read_strictly(tmp_path):
    def read(content):
        file = tmp_path / "costs.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return read_cost_file(file)

    model = read({"unit": "ms", "forward": [1, 2], "communication": {"latency": 1, "bandwidth": 2, "forward_size": 4}})
    assert (model.stages, model.unit, model.costs.forward) == (2, "ms", [1, 2])
    assert model.costs.communication.forward_times(2) == [3.0, 3.0]
    assert read({"c": 0.5}).costs.communication.latency == 0.5
    assert read({}).stages is None
    for content, message in (
        ("{", "expected JSON in costs.json"),
        ("[]", "expected an object"),
        ({"forwards": 1}, "expected only forward, .* in the costs, saw forwards"),
        ({"memory": {"weights": 1}}, "in the memory, saw weights"),
        ({"memory": 3}, "in the memory, saw 3"),
        ({"forward": "1"}, "expected numbers from 0 up for forward in the costs, saw '1'"),
        ({"forward": [1, -2]}, "saw -2"),
        ({"communication": {"bandwidth": 0}}, "expected a bandwidth above 0, saw 0"),
        ({"forward": [1, 2], "backward_input": [1]}, r"expected lists of one length .* saw lengths \[1, 2\]"),
    ):
        with pytest.raises(PlanError, match=message):
            read(content)


@pytest.mark.parametrize("command", [["simulate", "--csv"], ["validate"], ["render", "--measured"]])
def test_a_file_that_is_no_text_is_told(capsys, tmp_path, command):
    file = tmp_path / "picture.csv"
    file.write_bytes(b"\x89PNG\xff\xfe")
    code, out, err = run(capsys, *command, str(file))
    assert (code, out) == (2, "")
    assert "expected a text file, saw bytes that are none" in err
    assert len(err.strip().splitlines()) == 1


def test_recut_keeps_the_model():
    two = read_cost_text("f=2,b=4,w=6,r=8,c=1,a=3")
    four = recut(two, 2, 4)
    assert four.costs.forward == [1.0] * 4
    assert four.costs.communication.latency == 1.0
    assert four.memory.activation == [1.5] * 4
    assert recut(four, 2, 2).costs.backward_weight == [6.0, 6.0]
    assert recut(two, 2, 2) is two
    uneven = type(two)(Costs(forward=[1.0, 3.0]), Memory(), 2)
    assert recut(uneven, 2, 4).costs.forward == [0.5, 0.5, 1.5, 1.5]
    with pytest.raises(PlanError, match="expected a multiple or a divisor of 2 stages"):
        recut(uneven, 2, 3)


def test_the_commands_import_no_mindspore():
    code = (
        "import sys; from pipeline.cli import main\n"
        "main(['simulate', '--schedule', '1f1b', '--ranks', '2', '--micro-batches', '2', '--json'])\n"
        "main(['compare', '--schedule', '1f1b', '--ranks', '2', '--micro-batches', '2'])\n"
        "assert not {'mindspore', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_compare_orders_rows_without_a_plan_last():
    row = {"ranks": 1, "micro_batches": 1, "memory_limit": None, "makespan": 1.0, "within_memory_limit": True}
    assert compare._order(row) < compare._order({**row, "makespan": None, "within_memory_limit": False})
