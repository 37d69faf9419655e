"""Checkpoints: a crash at any moment leaves the newest complete step readable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mindspore import Parameter, Tensor

from scripts.training import checkpoint
from scripts.training.checkpoint import CheckpointError, complete_steps, load_stage, read_manifest, save_stage, seal

MODEL = {"layers": 4}


def _weights(value: float) -> list[Parameter]:
    return [Parameter(Tensor(np.full(3, value, np.float32)), name="w"), Parameter(Tensor(7), name="global_step")]


def _save(folder: Path, step: int) -> None:
    for stage in range(2):
        save_stage(folder, step, stage, _weights(step + stage / 2))
    seal(folder, step, MODEL, 2)


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    loaded = load_stage(tmp_path, 10, 1)
    np.testing.assert_array_equal(loaded["w"].asnumpy(), np.full(3, 10.5, np.float32))
    assert int(loaded["global_step"].asnumpy()) == 7
    assert read_manifest(tmp_path) == {"step": 10, "stages": 2, "model": MODEL}


def test_a_step_without_manifest_does_not_count(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    save_stage(tmp_path, 20, 0, _weights(20))
    assert complete_steps(tmp_path) == [10]
    assert read_manifest(tmp_path)["step"] == 10


def test_the_two_newest_steps_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _save(tmp_path, step)
    assert complete_steps(tmp_path) == [20, 30]
    assert not (tmp_path / "step-00000010").exists()


@pytest.mark.parametrize("moment", ["_force_to_disk", "_publish"])
def test_a_crash_while_writing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    _save(tmp_path, 10)

    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, moment, crash)
        with pytest.raises(KeyboardInterrupt):
            _save(tmp_path, 20)
        with pytest.raises(KeyboardInterrupt):
            seal(tmp_path, 20, MODEL, 2)
    assert not (tmp_path / "step-00000020" / "stage-0.ckpt").exists()
    assert read_manifest(tmp_path)["step"] == 10
    np.testing.assert_array_equal(load_stage(tmp_path, 10, 0)["w"].asnumpy(), np.full(3, 10, np.float32))
    _save(tmp_path, 20)
    assert read_manifest(tmp_path)["step"] == 20


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    file = tmp_path / "step-00000010" / "stage-0.ckpt"
    file.chmod(0o600)
    file.write_bytes(b"\x00\x01 not a checkpoint")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_stage(tmp_path, 10, 0)
