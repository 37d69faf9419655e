"""Bytes of text, cut into a part to train on and a held-out part.

Which bytes a step sees follows from the seed and the step alone, so a resumed job goes on exactly where it stopped.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scripts.training.text_files import DataError, check_data, text_files

__all__ = ["Text"]

_HELD_OUT_EVERY = 10
_PIECE = 4096


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
    for file in text_files(path):
        parts.append(np.frombuffer(file.read_bytes(), np.uint8)[: limit - total])
        total += len(parts[-1])
        if total >= limit:
            break
    return np.concatenate(parts)
