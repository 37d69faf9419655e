"""A timeline as text: a line per rank, time from left to right, `.` where the rank idles.

A box shows its action, without the stage if no rank has more than one. What is wider than the terminal is cut into
panels, one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeline.plan.action import Action, Kind
from pipeline.plan.render.timeline import Timeline

_MOST_COLUMNS = 4000


class Box(NamedTuple):
    """A piece of a line: its text, and the kind of action in it (None: no action)."""

    text: str
    kind: Kind | None


def text_grid(timeline: Timeline, columns: int | None = None) -> str:
    """The timeline as text.

    Args:
        timeline: what to show.
        columns: how wide a line may be (at least 20); None: any width, so that there is one panel.
    """
    return "\n".join("".join(box.text for box in line) for line in text_boxes(timeline, columns))


def text_boxes(timeline: Timeline, columns: int | None = None) -> list[list[Box]]:
    """The lines of `text_grid` in pieces, for a terminal that shows colours. Between panels there is an empty line."""
    heads = [f"rank {rank} " for rank in range(timeline.ranks)]
    head = max(map(len, heads), default=0)
    with_stage = any(len(timeline.stages_of(rank)) > 1 for rank in range(timeline.ranks))
    scale = _columns_per_time(timeline, with_stage)
    total = round(timeline.end * scale)
    width = total if columns is None else max(columns, 20) - head
    lines = [list(_line(timeline, rank, scale, with_stage)) for rank in range(timeline.ranks)]
    result: list[list[Box]] = []
    for start in range(0, max(total, 1), max(width, 1)):
        if start:
            result.append([])
        result += [[Box(heads[rank].rjust(head), None), *_cut(line, start, width)] for rank, line in enumerate(lines)]
    return result


def _columns_per_time(timeline: Timeline, with_stage: bool) -> float:
    """The smallest scale at which every label fits its box with a space after it, within a bound."""
    needed = [
        (len(_label(event.action, with_stage)) + 1) / (event.end - event.start)
        for rank in range(timeline.ranks)
        for event in timeline.compute(rank)
    ]
    return min(max(needed, default=1.0), _MOST_COLUMNS / (timeline.end or 1.0))


def _line(timeline: Timeline, rank: int, scale: float, with_stage: bool) -> Iterator[Box]:
    column = 0
    for event in timeline.compute(rank):
        start, end = (round(time * scale) for time in (event.start, event.end))
        if start > column:
            yield Box("." * (start - column), None)
            column = start
        if end > column:
            label = _label(event.action, with_stage)
            yield Box(label[: end - column].ljust(end - column), event.action.kind)
            column = end
    rest = round(timeline.end * scale) - column
    if rest > 0:
        yield Box("." * rest, None)


def _cut(line: list[Box], start: int, width: int) -> Iterator[Box]:
    """The part of a line from a column on."""
    column = 0
    for box in line:
        piece = box.text[max(start - column, 0) : max(start + width - column, 0)]
        if piece:
            yield Box(piece, box.kind)
        column += len(box.text)


def _label(action: Action, with_stage: bool) -> str:
    return "+".join(f"{part.stage if with_stage else ''}{part.kind.value}{part.micro_batch}" for part in action.parts)
