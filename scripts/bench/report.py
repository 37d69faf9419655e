"""What the benches share: measurements in processes of their own, table, JSON file, plot, record of the machine.

A bench is a script that runs itself. For each mode it starts a child (`--only CASE MODE`), which measures once for
every line on its standard input and prints the figures as one line of JSON. So no measurement sees the memory pool or
the caches of another mode, and a bench of times can still take its modes in turn, many times over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
_MARK = "figures: "

# A bench also runs from a checkout that is not installed. Children are found there in the same way.
sys.path.insert(0, str(ROOT))

Row = Mapping[str, Any]


def bench_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every bench has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results to FILE (png, svg or pdf)")
    parser.add_argument("--case", action="append", help="measure this case only (may be given several times)")
    parser.add_argument("--mode", action="append", help="measure this mode only (may be given several times)")
    parser.add_argument("--only", nargs=2, metavar=("CASE", "MODE"), help="measure one mode in this process")
    return parser


def environment() -> dict[str, Any]:
    """Describe what the figures were taken on."""
    from hyper_parallel.platform.mindspore.environment import device_target

    target = device_target()
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "mindspore": metadata.version("mindspore"),
        "numpy": metadata.version("numpy"),
        "device_target": target,
        "launch_blocking": target == "CPU",
    }


def serve(measure: Callable[[], Row]) -> None:
    """In the child: measure once for each line that the parent writes."""
    for _ in sys.stdin:
        print(_MARK + json.dumps(measure()), flush=True)


class ModeProcess:
    """In the parent: the process of one mode. A context manager, so that no child is left behind."""

    def __init__(self, script: str, case: str, mode: str, options: Sequence[str] = ()) -> None:
        self.case = case
        self.mode = mode
        self._said: deque[str] = deque(maxlen=60)
        self._process = subprocess.Popen(
            [sys.executable, script, "--only", case, mode, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> ModeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def measure(self) -> dict[str, Any]:
        """Let the child measure once and return its figures."""
        try:
            self._process.stdin.write("measure\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
            self._said.append(line)
        raise self._failure()

    def _failure(self) -> RuntimeError:
        self._said.extend(self._process.stdout)
        exit_code = self._process.wait()
        return RuntimeError(f"case {self.case}, mode {self.mode}: exit {exit_code}, it said:\n{''.join(self._said)}")


def show_table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print the rows as a table, a line between cases."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "mode") else "right")
    for row, following in zip(rows, [*rows[1:], {}]):
        table.add_row(*(_cell(row.get(column)) for column in columns), end_section=row["case"] != following.get("case"))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_json(path: Path, rows: Sequence[Row], **more: Any) -> None:
    """Write `{"results": rows, "environment": ...}` and whatever else the bench has to say."""
    path.write_text(json.dumps({"results": list(rows), "environment": environment(), **more}, indent=2) + "\n")


def plot_bars(path: Path, rows: Sequence[Row], figures: Mapping[str, str]) -> None:
    """Draw one panel per figure (name to axis label): cases along the axis, a bar per mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row["case"] for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    width = 0.8 / len(modes)
    canvas, panels = pyplot.subplots(len(figures), 1, figsize=(2 + 2 * len(cases), 3.2 * len(figures)), squeeze=False)
    for panel, (figure, label) in zip(panels[:, 0], figures.items()):
        for index, mode in enumerate(modes):
            values = {row["case"]: row.get(figure) or 0 for row in rows if row["mode"] == mode}
            places = [place + index * width for place, case in enumerate(cases) if case in values]
            panel.bar(places, [values[case] for case in cases if case in values], width, label=mode)
        panel.set_xticks([place + 0.4 - width / 2 for place in range(len(cases))], cases)
        panel.set_ylabel(label)
        panel.legend()
    canvas.tight_layout()
    canvas.savefig(path)
