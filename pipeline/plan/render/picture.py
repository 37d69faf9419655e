"""Timelines as SVG or PNG: a lane per rank, a box per action with its micro-batch, memory beneath.

What the picture shows:
1. A lane is light grey; where the grey is seen, the rank idles.
2. A box has the colour of its kind. If a rank has several stages, the boxes of its later ones are darker.
3. An overlapped pair is one box: its forward above, its backward below.
4. Sends and receives are a thin line along the bottom of the lane: they keep no rank busy.
5. Several timelines (simulated, measured) stand one below the other; those with the same unit share the time axis.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.plan.action import Action, Kind, PlanError
from pipeline.plan.render.timeline import Timeline

COLOURS = {
    Kind.F: "#8ab6e8",
    Kind.R: "#c9a6e4",
    Kind.B: "#7cc48f",
    Kind.I: "#86d0c8",
    Kind.W: "#f4bf6b",
    Kind.SEND_F: "#4a4a4a",
}
_NAMES = {Kind.F: "forward", Kind.R: "recompute", Kind.B: "backward", Kind.I: "dx", Kind.W: "dw"}
_BUBBLE = "#ececec"
_INK = "#333333"
_LANE_INCHES = 0.3
_MEMORY_INCHES = 1.1
_LABEL_POINTS = 7.0


def save_picture(timelines: Sequence[Timeline], file: str | Path, memory_limit: float | None = None) -> None:
    """Draw timelines into a file.

    Args:
        timelines: what to draw, from top to bottom.
        file: its ending (.svg or .png) says the format.
        memory_limit: drawn as a line over the memory curves.

    Raises:
        PlanError: another ending, or nothing to draw.
    """
    file = Path(file)
    if file.suffix not in (".svg", ".png"):
        raise PlanError(f"expected a picture file that ends in .svg or .png, saw {file.name!r}")
    if not any(timeline.end for timeline in timelines):
        raise PlanError("expected a timeline with at least one action that takes time, saw none")
    import matplotlib

    matplotlib.use("Agg")
    # The same plan gives the same file: no date, and identifiers that do not depend on the moment.
    metadata = {"Date": None} if file.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "pipeline", "font.size": 8, "path.simplify": False}):
        _figure(timelines, memory_limit).savefig(file, dpi=130, metadata=metadata)


def _figure(timelines: Sequence[Timeline], memory_limit: float | None) -> Any:
    from matplotlib.figure import Figure

    heights = []
    for timeline in timelines:
        heights.append(_LANE_INCHES * timeline.ranks)
        if timeline.memory:
            heights.append(_MEMORY_INCHES)
    figure = Figure(figsize=(_width(timelines), sum(heights) + 0.45 * len(heights) + 0.5), layout="constrained")
    axes = iter(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    ends = [max(other.end for other in timelines if other.unit == timeline.unit) for timeline in timelines]
    for timeline, end in zip(timelines, ends):
        lanes = next(axes)
        _draw_lanes(lanes, timeline, end)
        if timeline.memory:
            lanes.tick_params(labelbottom=False)
            lanes = next(axes)
            _draw_memory(lanes, timeline, memory_limit)
        lanes.set_xlim(0, end)
        lanes.set_xlabel(f"time ({timeline.unit or 'units of the costs'})")
    _draw_legend(figure, timelines)
    return figure


def _width(timelines: Sequence[Timeline]) -> float:
    """Wide enough that a typical box takes its label, within what a page can show."""
    inches = 0.0
    for timeline in timelines:
        lengths = sorted(e.end - e.start for rank in range(timeline.ranks) for e in timeline.compute(rank))
        if lengths:
            inches = max(inches, 0.17 * timeline.end / lengths[len(lengths) // 4])
    return min(max(inches, 6.0), 22.0) + 1.2


def _draw_lanes(axes: Any, timeline: Timeline, end: float) -> None:
    inches_per_time = (axes.figure.get_figwidth() - 1.2) / end
    for rank in range(timeline.ranks):
        stages = timeline.stages_of(rank)
        axes.broken_barh([(0, timeline.end)], (rank - 0.42, 0.84), facecolor=_BUBBLE, linewidth=0)
        boxes: dict[str, list[tuple[float, float, float, float]]] = {}
        for event in timeline.compute(rank):
            for (low, height), part in zip(_halves(event.action), event.action.parts):
                colour = shade(COLOURS[part.kind], stages.index(part.stage), len(stages))
                boxes.setdefault(colour, []).append((event.start, event.end, rank + low, height))
                _label(axes, part, event.start, event.end, rank + low + height / 2, height, inches_per_time)
        for colour, places in boxes.items():
            _draw_boxes(axes, places, colour)
        for event in timeline.communication(rank):
            axes.plot([event.start, event.end], [rank + 0.45] * 2, color=COLOURS[Kind.SEND_F], linewidth=1.2)
    axes.set_title(timeline.name, loc="left", fontsize=9, color=_INK)
    axes.set_xlim(0, end)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.tick_params(length=0, axis="y")
    axes.spines[["top", "right", "left"]].set_visible(False)


def _halves(action: Action) -> list[tuple[float, float]]:
    """(offset from the middle of the lane, height) of the boxes of an action."""
    return [(-0.42, 0.42), (0.0, 0.42)] if action.sub_actions else [(-0.42, 0.84)]


def _draw_boxes(axes: Any, places: list[tuple[float, float, float, float]], colour: str) -> None:
    from matplotlib.collections import PolyCollection

    corners = [
        [(start, low), (end, low), (end, low + height), (start, low + height)] for start, end, low, height in places
    ]
    axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.6, clip_on=False))


def _label(axes: Any, part: Action, start: float, end: float, y: float, height: float, inches_per_time: float) -> None:
    """Write the micro-batch into its box, smaller if it must be, not at all if it could not be read."""
    text = str(part.micro_batch)
    points = min(_LABEL_POINTS, 72 * (end - start) * inches_per_time / (0.75 * len(text)), 20 * height)
    if points >= 3:
        axes.text((start + end) / 2, y, text, ha="center", va="center", fontsize=points, color=_INK)


def shade(colour: str, index: int, count: int) -> str:
    """The colour of a rank's stage: the first as it is, the last darkest."""
    if count == 1 or index == 0:
        return colour
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    darker = colorsys.hls_to_rgb(hue, light - 0.16 * index / (count - 1), saturation)
    return "#" + "".join(f"{round(255 * value):02x}" for value in darker)


def _draw_memory(axes: Any, timeline: Timeline, limit: float | None) -> None:
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for rank, curve in enumerate(timeline.memory):
        times = [0.0, *(time for time, _ in curve), timeline.end]
        held = [0.0, *(level for _, level in curve), curve[-1][1] if curve else 0.0]
        colour = colours(0.9 * rank / max(timeline.ranks - 1, 1))
        axes.plot(times, held, drawstyle="steps-post", color=colour, linewidth=1, label=f"rank {rank}")
    if limit is not None:
        axes.axhline(limit, color="#c0392b", linewidth=1, linestyle="--", label="limit")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("memory")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    shown = slice(None) if timeline.ranks <= 8 else slice(None, None, -(-timeline.ranks // 8))
    axes.legend(handles[shown], labels[shown], loc="upper left", bbox_to_anchor=(1.0, 1.05), frameon=False, fontsize=6)


def _draw_legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    kinds = {
        part.kind
        for timeline in timelines
        for rank in range(timeline.ranks)
        for event in timeline.compute(rank)
        for part in event.action.parts
    }
    patches = [Patch(facecolor=COLOURS[kind], label=name) for kind, name in _NAMES.items() if kind in kinds]
    patches.append(Patch(facecolor=_BUBBLE, label="bubble"))
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=7)
