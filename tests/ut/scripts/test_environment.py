"""The process environment: a wrong MindSpore is one sentence, and msrun's variables are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest

from hyper_parallel.platform.mindspore import environment

ROOT = Path(environment.__file__).resolve().parents[3]


def _import_with(stub: Optional[Path], module: str) -> subprocess.CompletedProcess[str]:
    """Import a module in a process that sees a stand-in for MindSpore first, or none at all."""
    code = f"import {module}"
    if stub is None:
        code = f"import sys\nsys.modules['mindspore'] = None\n{code}"
    path = os.pathsep.join(map(str, filter(None, (stub, ROOT))))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=ROOT.parent
    )


@pytest.mark.parametrize(
    "module", ["hyper_parallel.core.activation_checkpoint", "hyper_parallel.platform", "pipeline.execution.chunk"]
)
def test_an_unsupported_mindspore_is_one_clear_sentence(tmp_path: Path, module: str) -> None:
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore" / "__init__.py").write_text('__version__ = "2.9.0"\n')
    done = _import_with(tmp_path, module)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedMindSporeError: MindSpore 2.10.x is needed, but this Python has MindSpore 2.9.0" in last
    assert "AttributeError" not in done.stderr


def test_a_missing_mindspore_is_one_clear_sentence() -> None:
    done = _import_with(None, "hyper_parallel.platform.mindspore")
    assert done.returncode == 1
    assert "no MindSpore is installed" in done.stderr.strip().splitlines()[-1]


def test_this_mindspore_is_supported() -> None:
    assert environment.check_mindspore_version().startswith("2.10.")


@pytest.mark.parametrize(("value", "target"), [(None, "CPU"), ("cpu", "CPU"), ("Ascend", "Ascend")])
def test_device_target(monkeypatch: pytest.MonkeyPatch, value: Optional[str], target: str) -> None:
    monkeypatch.delenv("DEVICE_TARGET", raising=False)
    if value is not None:
        monkeypatch.setenv("DEVICE_TARGET", value)
    assert environment.device_target() == target


def test_an_ascend_that_is_not_there_is_told() -> None:
    from mindspore.device_context import ascend

    if ascend.is_available():
        pytest.skip("this machine has an NPU")
    with pytest.raises(RuntimeError, match="finds no NPU"):
        environment.check_device("Ascend")


def test_worker_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "2")
    monkeypatch.setenv("MS_WORKER_NUM", "4")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    assert environment.worker_environment() == (2, 4, False)
    monkeypatch.setenv("RANK_ID", "4")
    with pytest.raises(ValueError, match="RANK_ID below MS_WORKER_NUM"):
        environment.worker_environment()
