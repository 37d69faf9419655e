"""What the launcher refuses before any worker starts: one sentence that says what is wrong and what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.training import launch
from scripts.training.checkpoint import seal
from scripts.training.options import check, model_sizes, parse


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("some text to learn. " * 1000)
    return file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "10", "--micro-batches", "4"], ["--batch 10", "4 equal micro-batches", "12"]),
        (["--layers", "3"], ["--layers 3", "--stages 4", "--layers 4 or more"]),
        (["--workers", "2"], ["--stages 4", "2 workers", "--stages 2"]),
        (
            ["--nodes", "2", "--workers", "4", "--master-addr", "10.0.0.1", "--port", "9"],
            ["8 workers on 2 machines", "--stages 8"],
        ),
        (["--nodes", "2", "--node-rank", "2"], ["--node-rank 2", "0 to 1"]),
        (["--nodes", "2", "--port", "9"], ["--master-addr"]),
        (["--nodes", "2", "--master-addr", "10.0.0.1"], ["--port"]),
        (["--steps", "0"], ["--steps is 0", "at least 1"]),
        (["--nodes", "0"], ["--nodes is 0", "at least 1"]),
        (["--checkpoint-every", "0"], ["--checkpoint-every is 0", "at least 1"]),
        (["--width", "30"], ["--width 30", "--heads 4"]),
        (["--experts", "1"], ["--experts-per-token 2", "--experts 1"]),
    ],
)
def test_a_contradiction_is_refused(arguments: list[str], words: list[str], text: Path) -> None:
    with pytest.raises(ValueError) as caught:
        check(parse([*arguments, "--data", str(text)]))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_good_options_pass(text: Path) -> None:
    options = parse(["--data", str(text), "--stages", "2"])
    check(options)
    assert options.workers == 2


def test_missing_data_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--data", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out")]) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("cannot train: --data names") and "does not exist" in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_resume_without_a_job_is_refused(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--data", str(text), "--out", str(tmp_path), "--resume"]) == 2
    assert "found no complete checkpoint" in capfd.readouterr().err


def test_resume_of_another_model_is_refused(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", str(text), "--out", str(tmp_path), "--steps", "20"]
    _sealed(tmp_path, 10, arguments)
    assert launch.main([*arguments, "--resume", "--layers", "8"]) == 2
    error = capfd.readouterr().err
    assert "another model" in error and "layers 4 (now 8)" in error


def test_resume_with_nothing_left_is_refused(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", str(text), "--out", str(tmp_path), "--steps", "10"]
    _sealed(tmp_path, 10, arguments)
    assert launch.main([*arguments, "--resume"]) == 2
    assert "has done 10 steps" in capfd.readouterr().err


def test_an_earlier_job_is_not_overwritten(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", str(text), "--out", str(tmp_path)]
    _sealed(tmp_path, 10, arguments)
    assert launch.main(arguments) == 2
    assert "holds an earlier job" in capfd.readouterr().err


def _sealed(out: Path, step: int, arguments: list[str]) -> None:
    """Make a complete checkpoint as far as its manifest tells."""
    options = parse(arguments)
    (out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    seal(out / "checkpoints", step, model_sizes(options), options.stages)
