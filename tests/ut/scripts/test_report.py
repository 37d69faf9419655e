"""Metrics, summary and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.training.report import draw_losses, drop_metrics_after, read_metrics, summarise

METRICS = [{"step": s, "loss": 5.0 - s, "tokens_per_s": 100.0 * s, "seconds": 1.0} for s in (1, 2, 3)]


def _rank(rank: int, blocks: list[int], excluded: list[int]) -> dict:
    runs = {f"block layer{i}": count for i, count in enumerate(blocks)}
    runs.update({f"excluded layer{i}": count for i, count in enumerate(excluded)})
    return {"rank": rank, "micro_batches": 10, "runs": runs, "peak_memory_mib": 100.04}


def _write(file: Path) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in METRICS))


def test_a_line_being_written_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file)
    with file.open("a") as more:
        more.write('{"step": 4, "lo')
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3]


def test_lines_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file)
    drop_metrics_after(file, 2)
    assert [line["step"] for line in read_metrics(file)] == [1, 2]


def test_the_summary_counts_executions() -> None:
    summary = summarise(METRICS, [_rank(0, [20, 20], [10, 10, 10, 10]), _rank(1, [20], [10, 10])])
    assert summary["block_runs_per_micro_batch"] == 2
    assert summary["excluded_runs_per_micro_batch"] == 1
    assert summary["first_loss"] == 4.0 and summary["last_loss"] == 2.0 and summary["tokens_per_s"] == 200.0
    assert summary["peak_memory_mib"] == {"0": 100.0, "1": 100.0}


def test_one_replay_too_many_shows_in_the_summary() -> None:
    summary = summarise(METRICS, [_rank(0, [21, 19], [10, 11])])
    assert summary["block_runs_per_micro_batch"] == pytest.approx(2.0)
    assert isinstance(summary["block_runs_per_micro_batch"], float)
    assert summary["excluded_runs_per_micro_batch"] == pytest.approx(1.05)


def test_the_loss_curve_is_a_picture(tmp_path: Path) -> None:
    draw_losses([*METRICS, {**METRICS[-1], "step": 4, "validation_loss": 2.5}], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
