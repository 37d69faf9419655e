"""The quick matrix is green: every schedule, recompute mode, exclusion, split and model against one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.st


def test_regress_quick(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "regress.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "regress.json").read_text())
    assert report["failed"] == 0 and report["passed"] == len(report["cases"]) > 0
    assert {case["ranks"] for case in report["cases"]} == {2, 4}
