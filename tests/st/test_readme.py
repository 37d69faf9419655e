"""The README's example runs as it stands there, and what the README points to exists."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from pipeline.launch import find_msrun, free_port

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
STEP = re.compile(r"^step (\d+) loss ([\d.]+)$", re.MULTILINE)


@pytest.mark.st
def test_the_example_learns(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    (command,) = re.findall(r"^msrun (.*) example\.py$", README, re.MULTILINE)
    msrun = find_msrun()
    assert msrun is not None
    path = os.pathsep.join((str(Path(msrun).parent), os.environ["PATH"]))
    process = subprocess.Popen(
        [msrun, *command.split(), f"--master_port={free_port()}", "--log_dir=.", "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", "GLOG_v": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        _end(tmp_path)
    logs = [(tmp_path / f"worker_{rank}.log").read_text() for rank in range(2)]
    assert process.returncode == 0, output + "".join(logs)
    assert STEP.findall(logs[0]) == []
    told = STEP.findall(logs[1])
    assert [int(step) for step, _ in told] == list(range(20)), output + logs[1]
    assert float(told[-1][1]) < 0.5 * float(told[0][1])


def test_links_and_files_exist() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)#]+)", README)]
    assert [link for link in links if not (ROOT / link).exists()] == []


def _end(folder: Path) -> None:
    """End what still works in a folder of ours."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
        except psutil.Error:
            continue
