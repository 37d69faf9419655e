"""The bench of the split backward writes what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "split_backward.py"


def test_the_file_has_a_row_for_each_place_of_the_replay(tmp_path: Path) -> None:
    file = tmp_path / "split.json"
    least = ("--rounds", "1", "--seconds", "0", "--processes", "1")
    command = [sys.executable, str(SCRIPT), "--case", "mlp-256", *least, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [(row["case"], row["replay"]) for row in found["results"]] == [
        ("mlp-256", replay) for replay in ("none", "inside", "before")
    ]
    for row in found["results"]:
        assert min(row["full_ms"], row["dx_ms"], row["dw_ms"]) > 0
        assert row["processes"] == 1 and row["dx_ratio"] < row["sum_ratio"]
    assert found["memory"] == [] and "mindspore" in found["environment"]
