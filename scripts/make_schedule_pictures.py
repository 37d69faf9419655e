"""Draw the pictures of docs/schedules.md into docs/img/.

    python scripts/make_schedule_pictures.py [--to docs/img] [NAME ...]

One picture per named schedule (4 ranks, 8 micro-batches; forward, dx and dw take one unit each per stage), lazy against
pre-fired recompute, and the plan that `auto` finds for uneven stages beside the best named one. The same sources give
the same files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.plan import SCHEDULES, Costs, Memory, Plan, make_plan, simulate
from pipeline.plan.passes import insert_recompute
from pipeline.plan.render import Timeline, save_picture, simulated
from pipeline.plan.search import auto

_RANKS, _MICRO_BATCHES = 4, 8
_UNEVEN_TIMES = [1.5, 1.5, 1.0, 1.0]
_UNEVEN = Costs(_UNEVEN_TIMES, _UNEVEN_TIMES, [0.8 * time for time in _UNEVEN_TIMES], _UNEVEN_TIMES)
_MEMORY = Memory(checkpoint_input=0.1)
_UNEVEN_LIMIT = 3.0


def pictures() -> Iterator[tuple[str, list[Timeline], float | None]]:
    """The name of each picture, what it shows, and the memory limit that it draws."""
    for name in SCHEDULES:
        yield name, [_timeline(make_plan(name, _RANKS, _MICRO_BATCHES))], None
    plan = make_plan("1f1b", _RANKS, _MICRO_BATCHES)
    modes = [insert_recompute(plan, mode) for mode in ("lazy", "prefire")]
    yield "recompute", [_timeline(plan, Costs(recompute=1.0), _MEMORY) for plan in modes], None
    found = auto(_RANKS, _MICRO_BATCHES, _UNEVEN, _MEMORY, _UNEVEN_LIMIT, recompute=("none", "lazy", "prefire"))
    plans = [found.best_named.plan, found.plan] if found.best_named else [found.plan]
    yield "auto", [_timeline(plan, _UNEVEN, _MEMORY) for plan in plans], _UNEVEN_LIMIT


def _timeline(plan: Plan, costs: Costs | None = None, memory: Memory | None = None) -> Timeline:
    simulation = simulate(plan, costs, memory)
    return simulated(simulation, f"{plan.name}: {simulation.makespan:g} units, bubble {simulation.bubble:g}")


def main() -> int:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--to", type=Path, default=Path("docs/img"), help="directory (default docs/img)")
    parser.add_argument("--png", action="store_true", help="draw PNG instead of SVG")
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    for name, timelines, memory_limit in pictures():
        if not args.names or name in args.names:
            file = args.to / f"{name}.{'png' if args.png else 'svg'}"
            save_picture(timelines, file, memory_limit)
            print(f"{file} {file.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
