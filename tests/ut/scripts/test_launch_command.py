"""``python -m pipeline launch``: what it refuses, what it shows, and how a script's end is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli, launch_worker
from pipeline.commands.launch import _show

ROOT = Path(launch_worker.__file__).resolve().parent.parent
GOOD = "import sys, beside; assert sys.argv[1:] == ['a', '--b'] and __name__ == '__main__'; sys.exit(0)"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "2", "nowhere.py"], "there is no script nowhere.py"),
        (["--workers", "0", "nowhere.py"], "--workers is 0, but must be at least 1"),
        (["--workers", "2", "--nodes", "2", "--port", "9", "nowhere.py"], "--master-addr must be an address"),
    ],
)
def test_refusals_are_one_sentence(arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *arguments]) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("cannot launch: ") and words in error and "\n" not in error


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        (GOOD, 0, "finished.rank1"),
        ("raise SystemExit(3)", 1, "failure.rank1.json"),
        ("1 / 0", 1, "failure.rank1.json"),
    ],
)
def test_a_worker_tells_how_its_script_ended(tmp_path: Path, body: str, code: int, told: str) -> None:
    (tmp_path / "script.py").write_text(body)
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "logs").mkdir()
    variables = {"RANK_ID": "1", "MS_WORKER_NUM": "2", "MS_ROLE": "MS_WORKER", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, launch_worker.__file__, str(tmp_path / "script.py"), "a", "--b"],
        env={**os.environ, **variables, "PIPELINE_LOG_DIR": str(tmp_path / "logs")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert [file.name for file in (tmp_path / "logs").iterdir()] == [told]


def test_new_output_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "worker_0.log"
    assert _show(log, 0) == 0
    log.write_text("one\n")
    shown = _show(log, 0)
    with log.open("a") as file:
        file.write("two\n")
    _show(log, shown)
    assert capsys.readouterr().out == "one\ntwo\n"
