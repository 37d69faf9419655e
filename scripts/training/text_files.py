"""Which files the text is read from. Needs nothing but Python, so that it can be checked before anything is set up."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

__all__ = ["DataError", "check_data", "default_data", "text_files"]

_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cc", ".cpp", ".json", ".html", ".csv")
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", ".git", ".venv"}


class DataError(ValueError):
    """The text cannot be read, or is too short."""


def default_data() -> Path:
    """Return the folder of the running Python's standard library: text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def text_files(path: Path) -> list[Path]:
    """Return a file itself, or the text files under a folder in the order of their names."""
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
    if not text_files(path):
        raise DataError(
            f"--data names {path}, a folder without text files ({', '.join(_TEXT_SUFFIXES)}): "
            "give a text file or a folder that holds some"
        )
