"""What goes to the terminal as a table, and into the file that ``--out`` names as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline.plan import PlanError
from pipeline.plan.render import Timeline, chrome_trace, save_picture

_WIDEST = 1000


def save(timelines: Sequence[Timeline], out: str, memory_limit: float | None = None) -> None:
    """Write a picture (.svg, .png) or a trace for Perfetto (.json).

    Raises:
        PlanError: another ending.
    """
    file = Path(out)
    if file.suffix == ".json":
        file.write_text(chrome_trace(timelines))
    elif file.suffix in (".svg", ".png"):
        save_picture(timelines, file, memory_limit)
    else:
        raise PlanError(f"expected --out with a file that ends in .svg, .png or .json, saw {out!r}")


def print_table(title: str, table: Table) -> None:
    """Print a table beneath a line of its own: as wide as the terminal, or as it needs where there is none (a pipe)."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=Console(width=_WIDEST).measure(table).maximum)
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table)
