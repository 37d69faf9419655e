"""What an excluded region keeps alive between forward and backward, as the benches in scripts/bench measure it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


def measured(script: str, tmp_path: Path, *options: str) -> list[dict]:
    """Run a bench and return its results."""
    path = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH / script), "--json", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())["results"]


def test_a_region_keeps_its_output_and_not_its_input(tmp_path: Path) -> None:
    size = ("--rows", "1024", "--width", "1024")
    modes = [word for mode in ("none", "keep-inputs", "exclude") for word in ("--mode", mode)]
    rows = measured("memory.py", tmp_path, "--case", "norm-matmul-view", *modes, *size)
    alive = {row["mode"]: row["alive_mib"] for row in rows}
    peak = {row["mode"]: row["peak_mib"] for row in rows}
    assert alive == pytest.approx({"none": 12, "keep-inputs": 8, "exclude": 4}, abs=1)
    assert peak["exclude"] <= peak["keep-inputs"] + 2


@pytest.mark.parametrize("case", ["norm-matmul", "moe-each", "moe-whole", "moe-chain"])
def test_activations_alive(case: str, tmp_path: Path) -> None:
    size = ("--rows", "1024", "--width", "1024")
    (row,) = measured("memory.py", tmp_path, "--case", case, "--mode", "exclude", *size)
    assert row["alive_tensors"] == (1 if case == "norm-matmul" else 2)
    assert row["alive_mib"] == pytest.approx(4 * row["alive_tensors"], abs=1)


def test_no_object_is_left_behind(tmp_path: Path) -> None:
    rows = measured("flatness.py", tmp_path, "--steps", "60", "--mode", "exclude")
    assert [row["case"] for row in rows] == ["clean", "errors"]
    for row in rows:
        assert (row["tensors"], row["objects"]) == (0, 0), row["grown"]
    assert rows[1]["errors"] == 6
