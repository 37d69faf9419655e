"""What the benches share: a measurement in a process of its own, the table, the JSON file, the record of the machine.

A bench is a script that runs itself: without `--only` it starts one child per measurement with `--only CASE MODE`, and
the child prints its figures as one line of JSON. So no measurement sees the memory pool or the caches of another one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
_MARK = "figures: "

Row = Mapping[str, Any]


def bench_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every bench has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and environment to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the results to FILE (png, svg or pdf)")
    parser.add_argument("--case", action="append", help="measure this case only (may be given several times)")
    parser.add_argument("--only", nargs=2, metavar=("CASE", "MODE"), help="measure one mode in this process")
    return parser


def environment() -> dict[str, Any]:
    """Describe what the figures were taken on."""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "mindspore": metadata.version("mindspore"),
        "numpy": metadata.version("numpy"),
        "device_target": "CPU",
        "launch_blocking": True,
    }


def print_figures(figures: Row) -> None:
    """Hand a child's figures to its parent."""
    print(_MARK + json.dumps(figures), flush=True)


def measure_alone(script: str, case: str, mode: str, extra: Sequence[str] = (), timeout: float = 600) -> dict[str, Any]:
    """Run one measurement of `script` in its own process and return the figures that it printed."""
    command = [sys.executable, script, "--only", case, mode, *extra]
    child_environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=child_environment, capture_output=True, text=True, timeout=timeout, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"case {case}, mode {mode}: exit {done.returncode}, stderr:\n{done.stderr[-4000:]}")
    return {"case": case, "mode": mode, **json.loads(lines[-1][len(_MARK) :])}


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
