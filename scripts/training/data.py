"""Bytes of text, cut into a part to train on and a held-out part.

Which bytes a step sees follows from the seed and the step alone, so a resumed job goes on exactly where it stopped.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Optional

import numpy as np

__all__ = ["DataError", "Text", "check_data", "default_data"]

_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cc", ".cpp", ".json", ".html", ".csv")
_HELD_OUT_EVERY = 10
_CHUNK = 4096


class DataError(ValueError):
    """The text cannot be read, or is too short."""


def default_data() -> Path:
    """Return the folder of the running Python's standard library: text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", ".git", ".venv"}
    found = (p for p in path.rglob("*") if p.suffix in _TEXT_SUFFIXES and p.is_file())
    return sorted(p for p in found if not skipped.intersection(p.relative_to(path).parts[:-1]))


def check_data(path: Path) -> None:
    """Raise ``DataError`` with one sentence when there is no text at ``path``."""
    if not path.exists():
        raise DataError(f"--data names {path}, which does not exist: give a text file or a folder of text files")
    if not _files(path):
        raise DataError(
            f"--data names {path}, a folder without text files ({', '.join(_TEXT_SUFFIXES)}): "
            "give a text file or a folder that holds some"
        )


class Text:
    """The bytes under a path.

    Every tenth piece of 4096 bytes is held out, so both parts are of the same kind.

    Args:
        path: a file, or a folder whose text files are read in the order of their names.
        length: how many bytes the model sees at once.
        seed: of the order in which windows are drawn.
        limit: read at most this many bytes, spread over the files from the front.
    """

    def __init__(self, path: Path, length: int, seed: int, limit: int = 8_000_000) -> None:
        check_data(path)
        self.length, self.seed = length, seed
        everything = _read(path, limit)
        pieces = [everything[start : start + _CHUNK] for start in range(0, len(everything), _CHUNK)]
        held_out = pieces[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY] or pieces[-1:]
        training = [piece for i, piece in enumerate(pieces) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1]
        self.training, self.held_out = np.concatenate(training), np.concatenate(held_out)
        shortest = min(len(self.training), len(self.held_out))
        if shortest <= length + 1:
            raise DataError(
                f"--data names {path} with {len(everything)} bytes, which leaves a part of {shortest} bytes where "
                f"{length + 2} are needed: give more text"
            )

    def batch(self, step: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and labels of a step, each (batch, length) of int32."""
        generator = np.random.Generator(np.random.PCG64([self.seed, step]))
        return self._windows(self.training, generator.integers(0, len(self.training) - self.length - 1, batch))

    def validation(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and labels of the held-out part: always the same ones, evenly spread over it."""
        starts = np.linspace(0, len(self.held_out) - self.length - 2, batch).astype(np.int64)
        return self._windows(self.held_out, starts)

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        windows = text[starts[:, None] + np.arange(self.length + 1)[None, :]].astype(np.int32)
        return windows[:, :-1], windows[:, 1:]


def _read(path: Path, limit: Optional[int]) -> np.ndarray:
    """Return the bytes of the files one after the other."""
    parts, total = [], 0
    for file in _files(path):
        part = np.frombuffer(file.read_bytes(), np.uint8)
        parts.append(part if limit is None else part[: max(0, limit - total)])
        total += len(parts[-1])
        if limit is not None and total >= limit:
            break
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)
