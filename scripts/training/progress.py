"""Shows how far the job is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Optional

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Follows a metrics file while the workers write it.

    Args:
        metrics: the file, one JSON object per line; need not exist yet.
        steps: how many steps the job has in all.
        ranks: number of workers, for the line shown while they start.
    """

    def __init__(self, metrics: Path, steps: int, ranks: int) -> None:
        self._file, self._steps, self._ranks = metrics, steps, ranks
        self._read, self._rest = metrics.stat().st_size if metrics.exists() else 0, ""
        self._validation: Optional[float] = None
        self._first: Optional[tuple[int, float]] = None
        self._last_line = 0.0
        self._console = Console(file=sys.stdout)
        self._bar: Optional[Bar] = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[news]}"))
            self._bar = Bar(*columns, TimeElapsedColumn(), console=self._console)
            self._task = self._bar.add_task("training", total=self._steps, news=f"starting {self._ranks} workers")
            self._bar.start()
        else:
            print(f"starting {self._ranks} workers", flush=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def look(self) -> None:
        """Show what the workers wrote since the last look."""
        if not self._file.exists():
            return
        with self._file.open() as file:
            file.seek(self._read)
            *lines, self._rest = file.read().split("\n")
            self._read = file.tell() - len(self._rest.encode())
        for line in lines:
            self._show(json.loads(line))

    def _show(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        self._first = self._first or (step, time.monotonic())
        self._validation = metrics.get("validation_loss", self._validation)
        held_out = "" if self._validation is None else f"  held out {self._validation:.3f}"
        left = self._seconds_left(step)
        news = f"loss {metrics['loss']:.3f}{held_out}  {metrics['tokens_per_s']:.0f} tokens/s{left}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, news=news)
        elif step == self._steps or time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"step {step}/{self._steps}  {news}", flush=True)

    def _seconds_left(self, step: int) -> str:
        if self._first is None or step == self._first[0]:
            return ""
        pace = (time.monotonic() - self._first[1]) / (step - self._first[0])
        return f"  {(self._steps - step) * pace:.0f} s left"
