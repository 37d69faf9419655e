"""``python -m pipeline doctor``: can this machine run the project, and if not, what is to be done?

The MindSpore interfaces that the project needs by name are those that the files of
``hyper_parallel/platform/mindspore`` list as ``PRIVATE_INTERFACES``. They are read from the source, without importing
it, and each one is looked up by itself.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import dis
import importlib
import inspect
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.launch import Cluster, Job, LaunchError, find_msrun, free_port, python_path

__all__ = ["Check", "add_arguments", "examine", "interface_present", "private_interfaces", "run"]

_PLATFORM = Path(__file__).resolve().parent.parent / "hyper_parallel" / "platform" / "mindspore"
_MIN_FREE_MEMORY_MIB = 2048
_MIN_CORES = 1


@dataclass(frozen=True)
class Check:
    """One line of the doctor's screen.

    Attributes:
        name: what was looked at.
        ok: whether it is as needed.
        found: what was seen.
        advice: what to do when it is not as needed.
        owner: for an interface, the module or class that has it; the screen shows an owner's interfaces in one row.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""
    owner: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--time-out", type=float, default=60.0, metavar="S", help="seconds for the two-process exchange (default 60)"
    )
    parser.add_argument("--no-exchange", action="store_true", help="leave out the two-process exchange")


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 when anything is missing."""
    os.environ.setdefault("GLOG_v", "3")  # one screen, without MindSpore's warnings
    checks = examine(args.time_out, exchange=not args.no_exchange)
    healthy = all(check.ok for check in checks)
    if args.json:
        print(json.dumps({"ok": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print_screen(checks)
    return 0 if healthy else 1


def examine(time_out: float = 60.0, exchange: bool = True) -> list[Check]:
    """Look at everything the project needs and return the findings."""
    checks = [_python(), _mindspore(), _numpy(), *_interfaces(private_interfaces()), _device(), _msrun()]
    checks += [_cores(), _memory()]
    if exchange:
        ready = all(check.ok for check in checks if check.name in ("MindSpore", "numpy", "msrun", "device target"))
        checks.append(_exchange(time_out) if ready else Check("send and receive", False, "not tried", "see above"))
    return checks


def private_interfaces(folder: Path = _PLATFORM) -> list[str]:
    """Return the names in the ``PRIVATE_INTERFACES`` tuples of the files under ``folder``."""
    names: set[str] = set()
    for file in sorted(folder.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "PRIVATE_INTERFACES" for target in targets):
                names.update(ast.literal_eval(node.value))
    return sorted(names, key=_owner_and_name)


def _owner_and_name(interface: str) -> tuple[str, str]:
    """The module, class or library that has an interface, and what it is called there."""
    owner, _, name = interface.rpartition(":" if ":" in interface else ".")
    return owner, name


def interface_present(interface: str) -> bool:
    """Whether an interface can be reached.

    Args:
        interface: a dotted name, its longest importable front, then attributes; the last one may also be an attribute
            that a class's ``__init__`` gives to its instances. Or ``library.so:name``, a name in one of MindSpore's
            libraries.
    """
    if ":" in interface:
        return _in_library(*_owner_and_name(interface))
    parts = interface.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for position, name in enumerate(parts[length:], start=length + 1):
            if not hasattr(found, name):
                return position == len(parts) and name in _given_by_init(found)
            found = getattr(found, name)
        return True
    return False


def _in_library(library: str, name: str) -> bool:
    try:
        package = Path(importlib.import_module("mindspore").__file__).parent
        return hasattr(ctypes.CDLL(str(package / "lib" / library)), name)
    except (ImportError, OSError):
        return False


def _given_by_init(owner: Any) -> set[str]:
    """The attributes that the ``__init__`` of a class assigns, read from its code: nothing is called."""
    if not inspect.isclass(owner) or not inspect.isfunction(owner.__init__):
        return set()
    return {step.argval for step in dis.get_instructions(owner.__init__) if step.opname == "STORE_ATTR"}


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("Python", (3, 9) <= sys.version_info[:2] <= (3, 12), version, "use a Python from 3.9 to 3.12")


def _mindspore() -> Check:
    try:
        from hyper_parallel.platform.mindspore.environment import check_mindspore_version

        return Check("MindSpore", True, check_mindspore_version())
    except ImportError as error:
        return Check("MindSpore", False, str(error), "pip install 'mindspore==2.10.*'")


def _numpy() -> Check:
    advice = "pip install 'numpy>=1.26,<2': MindSpore 2.10 fails to start its numpy part with numpy 2"
    try:
        version = importlib.import_module("numpy").__version__
    except ImportError:
        return Check("numpy", False, "not installed", advice)
    return Check("numpy", (1, 26) <= tuple(map(int, version.split(".")[:2])) < (2, 0), version, advice)


def _interfaces(names: Iterable[str]) -> list[Check]:
    advice = "this MindSpore lacks an interface that the recompute or the pipeline needs: install mindspore==2.10.0"
    return [
        Check(name, present, "present" if present else "missing", "" if present else advice, _owner_and_name(name)[0])
        for name, present in ((name, interface_present(name)) for name in names)
    ]


def _device() -> Check:
    try:
        from hyper_parallel.platform.mindspore.environment import check_device, device_target

        target = device_target()
        return Check("device target", True, f"{target}, {check_device(target)}")
    except (ImportError, ValueError, RuntimeError) as error:
        return Check(
            "device target", False, str(error), "set DEVICE_TARGET to CPU, or install the NPU's driver and CANN"
        )


def _msrun() -> Check:
    path = find_msrun()
    return Check(
        "msrun", path is not None, path or "not found", "install MindSpore in this Python: msrun comes with it"
    )


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", usable >= _MIN_CORES, f"{usable} usable", "give this process a core")


def _memory() -> Check:
    free = psutil.virtual_memory().available // 2**20
    advice = f"free some: a job of four workers wants {_MIN_FREE_MEMORY_MIB} MiB"
    return Check("free memory", free >= _MIN_FREE_MEMORY_MIB, f"{free} MiB", advice)


def _exchange(time_out: float) -> Check:
    """Start two workers that send each other a tensor."""
    name, advice = "send and receive", "a firewall on the loopback address and too little memory are common causes"
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(__file__).with_name("doctor_exchange.py"))
        environment = {"PYTHONPATH": python_path(Path(__file__).resolve().parent.parent)}
        job = Job([script], Cluster(2, 2, port=free_port()), Path(folder), environment)
        try:
            job.start()
            outcome = job.poll()
            while outcome is None and time.monotonic() - start < time_out:
                time.sleep(0.1)
                outcome = job.poll()
            took = time.monotonic() - start
            if outcome is None:
                return Check(name, False, f"two workers did not finish within {time_out:g} s", advice)
            if not outcome:
                return Check(name, False, str(job.failure()), advice)
            return Check(name, True, f"two workers exchanged a tensor, {took:.1f} s with start-up")
        except LaunchError as error:
            return Check(name, False, str(error), advice)
        finally:
            job.stop()


def _print_screen(checks: list[Check]) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for owner, some in groupby(checks, key=lambda check: check.owner):
        for ok, name, found in [_row_of_owner(owner, list(some))] if owner else map(_row, some):
            table.add_row("[green]ok[/]" if ok else "[red]MISSING[/]", name, found)
    console.print(table)
    bad = [check for check in checks if not check.ok]
    for advice, some in groupby(bad, key=lambda check: check.advice or check.found):
        names = ", ".join(check.name for check in some)
        console.print(f"[red]{names}[/]: {escape(advice)}", soft_wrap=True)
    console.print("This machine can run the project." if not bad else f"{len(bad)} missing: see what to do above.")


def _row(check: Check) -> tuple[bool, str, str]:
    return check.ok, check.name, escape(check.found)


def _row_of_owner(owner: str, checks: list[Check]) -> tuple[bool, str, str]:
    """All interfaces of one module or class in a row; the missing ones are marked."""
    names = ((_owner_and_name(check.name)[1], check.ok) for check in checks)
    found = ", ".join(name if ok else f"[red]{name} is missing[/]" for name, ok in names)
    return all(check.ok for check in checks), owner, found
