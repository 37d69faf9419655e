"""Checkpoints of a job: one file per stage, and a manifest that is written last.

1. A file appears under its name only when it is whole: it is written beside it, forced to disk, then renamed.
2. A step counts only when its manifest is there, and the manifest is written when every stage's file is. A crash at any
   moment leaves the step before as the newest complete one.
3. The step before is removed only after the next one is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Optional

__all__ = ["CheckpointError", "check_model", "complete_steps", "load_stage", "read_manifest", "save_stage", "seal"]

_KEPT = 2


class CheckpointError(ValueError):
    """There is no usable checkpoint; the message says why and what to change."""


def complete_steps(folder: Path) -> list[int]:
    """Return the steps that have a manifest, oldest first."""
    return sorted(int(manifest.parent.name.split("-")[1]) for manifest in folder.glob("step-*/manifest.json"))


def read_manifest(folder: Path, step: Optional[int] = None) -> dict[str, Any]:
    """Return what the manifest of a step says, of the newest complete one when no step is given.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    steps = complete_steps(folder)
    if not steps:
        raise CheckpointError(
            f"--resume found no complete checkpoint in {folder}: leave --resume out, or name an earlier job's folder "
            "with --out"
        )
    return json.loads((_step_folder(folder, steps[-1] if step is None else step) / "manifest.json").read_text())


def check_model(folder: Path, manifest: Mapping[str, Any], model: Mapping[str, int], stages: int) -> None:
    """Raise ``CheckpointError`` when the checkpoint is of another model than the options describe."""
    wanted = {**model, "stages": stages}
    held = {**manifest["model"], "stages": manifest["stages"]}
    different = [f"{name} {held.get(name)} (now {value})" for name, value in wanted.items() if held.get(name) != value]
    if different:
        raise CheckpointError(
            f"{folder} holds a checkpoint of another model: {', '.join(different)}; "
            "give the options it was made with, or another --out"
        )


def save_stage(folder: Path, step: int, stage: int, parameters: Iterable[Any]) -> None:
    """Write the weights and the optimizer state of one stage."""
    import mindspore

    target = _stage_file(folder, step, stage)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.stem}.writing.ckpt")
    mindspore.save_checkpoint([{"name": p.name, "data": p} for p in parameters], str(temporary))
    _publish(temporary, target)


def seal(folder: Path, step: int, model: Mapping[str, int], stages: int) -> None:
    """Write the manifest of a step whose stages are all written, and remove what is older than the one before it."""
    target = _step_folder(folder, step) / "manifest.json"
    temporary = target.with_name(f"manifest.{os.getpid()}.writing")
    temporary.write_text(json.dumps({"step": step, "stages": stages, "model": dict(model)}, indent=2))
    _publish(temporary, target)
    for old in complete_steps(folder)[:-_KEPT]:
        (_step_folder(folder, old) / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(_step_folder(folder, old), ignore_errors=True)


def load_stage(folder: Path, step: int, stage: int) -> dict[str, Any]:
    """Return the parameters of one stage by name.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    import mindspore

    file = _stage_file(folder, step, stage)
    try:
        return mindspore.load_checkpoint(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}): remove its folder to resume from the step before"
        ) from error


def _step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _stage_file(folder: Path, step: int, stage: int) -> Path:
    return _step_folder(folder, step) / f"stage-{stage}.ckpt"


def _publish(temporary: Path, target: Path) -> None:
    """Force a written file to disk, then give it its name, and force the name to disk too."""
    _force_to_disk(temporary)
    temporary.replace(target)
    _force_to_disk(target.parent)


def _force_to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
