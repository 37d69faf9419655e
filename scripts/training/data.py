"""Bytes of text, cut into a part to train on and a held-out part.

Which bytes a step sees follows from the seed and the step alone, so a resumed job goes on exactly where it stopped.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np

__all__ = ["DataError", "Text", "check_data", "default_data"]

_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cc", ".cpp", ".json", ".html", ".csv")
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", ".git", ".venv"}
_HELD_OUT_EVERY = 10
_PIECE = 4096


class DataError(ValueError):
    """The text cannot be read, or is too short."""


def default_data() -> Path:
    """Return the folder of the running Python's standard library: text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        found += [Path(folder) / name for name in sorted(names) if name.endswith(_TEXT_SUFFIXES)]
    return found


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

    Every tenth piece of 4096 bytes (shorter in a short text) is held out, so both parts are of the same kind.

    Args:
        path: a file, or a folder whose text files are read in the order of their names.
        length: how many bytes the model sees at once.
        seed: of the order in which windows are drawn.
        limit: read at most this many bytes, from the front.
    """

    def __init__(self, path: Path, length: int, seed: int, limit: int = 4_000_000) -> None:
        check_data(path)
        self.length, self.seed = length, seed
        everything = _read(path, limit)
        piece = max(1, min(_PIECE, len(everything) // _HELD_OUT_EVERY))
        number = np.arange(len(everything)) // piece
        is_held_out = number % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        self.training, self.held_out = everything[~is_held_out], everything[is_held_out]
        shortest = min(len(self.training), len(self.held_out))
        if shortest < length + 2:
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


def _read(path: Path, limit: int) -> np.ndarray:
    """Return the bytes of the files one after the other."""
    parts, total = [np.zeros(0, np.uint8)], 0
    for file in _files(path):
        parts.append(np.frombuffer(file.read_bytes(), np.uint8)[: limit - total])
        total += len(parts[-1])
        if total >= limit:
            break
    return np.concatenate(parts)
