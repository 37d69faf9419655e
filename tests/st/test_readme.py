"""The README's example runs as it stands there, and what the README points to exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.st

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
STEP = re.compile(r"^step (\d+) loss ([\d.]+)$", re.MULTILINE)


def _launch(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script as the README says."""
    (folder / "example.py").write_text(script)
    (command,) = re.findall(r"^python (-m pipeline launch .*)$", README, re.MULTILINE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not _working_in(folder)
    return done


def _example() -> str:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return example


def test_the_example_learns(tmp_path: Path) -> None:
    done = _launch(tmp_path, _example())
    logs = [(tmp_path / "logs" / f"worker_{rank}.log").read_text() for rank in range(2)]
    assert done.returncode == 0, done.stderr + "".join(logs)
    assert STEP.findall(logs[0]) == []
    told = STEP.findall(done.stdout)
    assert [int(step) for step, _ in told] == list(range(20)), done.stdout + logs[1]
    assert float(told[-1][1]) < 0.5 * float(told[0][1])


def test_an_error_outside_of_a_step_is_told(tmp_path: Path) -> None:
    script = _example().replace("for step in", 'if world.rank == 0:\n    raise KeyError("no such thing")\nfor step in')
    done = _launch(tmp_path, script)
    assert done.returncode == 1
    assert "the job failed: rank 0: KeyError: 'no such thing'" in done.stderr and "worker_0.log" in done.stderr


def test_links_and_files_exist() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)#]+)", README)]
    assert [link for link in links if not (ROOT / link).exists()] == []


def _working_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found
