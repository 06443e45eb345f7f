"""A timeline as text: a row a rank, time to the right, idle time as dots; in blocks where it is wider than its place."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rich.text import Text

from functional_par.pipeline.schedule import KINDS
from functional_par.pipeline.timeline import Timeline
from functional_par.report.blocks import MOST, Bar, Block, blocks, through
from functional_par.report.cells import chunks, kinds, most_chunks, name, row_names, short

COLORS: Mapping[str, str] = MappingProxyType({"F": "blue", "B": "green", "I": "yellow", "W": "magenta"})
WIDEST = 1000
"""Columns beside the names where nothing limits them."""
SEVERAL = 6
"""Blocks that a measured timeline gets for the names of its short actions, of which some are noise."""
FINEST = 1e9
"""Columns of a whole picture; of more there is nothing to see."""


def gantt(timeline: Timeline, columns: int | None = None, labels: Sequence[str] = (), colored: bool = False) -> Text:
    """The picture, one line a rank. Its ``plain`` text is complete: colours only repeat what letters say.

    Args:
        timeline: simulated or measured.
        columns: the largest width, names included; None for ``WIDEST``. A picture that is wider is cut into blocks, each
            with its times and the names of the rows. The middle of one with more than 40 blocks is left out, which is said.
        labels: names of the rows, ``rank 0`` and so on if left out.
        colored: whether actions have a background; without, dashes show how far they reach.

    >>> from functional_par.pipeline.schedule import Action
    >>> from functional_par.pipeline.timeline import Span
    >>> spans = (Span(0, Action(0, "F", 0), 0, 1), Span(0, Action(0, "B", 0), 4, 6), Span(1, Action(1, "F", 0), 1, 2),
    ...          Span(1, Action(1, "B", 0), 2, 4))
    >>> print(gantt(Timeline(2, spans)).plain)
    rank 0  F0......B0--
    rank 1  ..F0B0--....
    """
    names = row_names(timeline, labels)
    margin = max(map(len, names), default=0) + 2
    room = _room(columns, margin)
    drawing = _drawing(timeline, room)
    parts = blocks(drawing.bars, drawing.width, max(room, drawing.step), drawing.step)
    if through(drawing.bars, parts):  # then names go on beyond the end of a block
        parts = blocks(drawing.bars, drawing.width, max(room - drawing.step + 1, drawing.step), drawing.step)
    lines: list[Text] = []
    for block, before in zip(parts, (None, *parts), strict=False):
        if len(parts) > 1:
            lines += _heading(timeline, drawing, block, before)
        rows = _rows(timeline.ranks, drawing.bars, block, colored)
        lines += (Text(label.ljust(margin)) + row for label, row in zip(names, rows, strict=True))
    return Text("\n").join(lines)


def legend(timeline: Timeline, columns: int | None = None, labels: Sequence[str] = ()) -> str:
    """What the letters mean, and how many actions or names had no room at all."""
    found = ", ".join(f"{kind} {KINDS[kind]}" for kind in kinds(timeline))
    most = most_chunks(timeline)
    if most == 2:
        found += "; small letters: the second stage of the rank"
    elif most > 2:
        found += "; before the letter the stage"
    found += "; after it the microbatch"
    drawing = _drawing(timeline, _room(columns, max(map(len, row_names(timeline, labels)), default=0) + 2))
    if drawing.cut:
        found += f"; too short for their names, which are cut: {_actions(drawing.cut)}"
    if drawing.left_out:
        found += f"; too short for a place, and left out: {_actions(drawing.left_out)} (--output FILE.json has all)"
    return found


def _actions(number: int) -> str:
    return f"{number} action{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class _Drawing:
    """A timeline in characters, as wide as its names need.

    Attributes:
        bars: the actions that have a place, in the order of their starts.
        width: of all of it.
        step: of the longest name, for which a short action has room.
        scale: characters a unit of time.
        cut: actions whose name is cut.
        left_out: actions without a place.
    """

    bars: tuple[Bar, ...]
    width: int
    step: int
    scale: float
    cut: int
    left_out: int


def _drawing(timeline: Timeline, room: int) -> _Drawing:
    most, places, start = most_chunks(timeline), chunks(timeline), timeline.start
    named = [(span, places[span.rank, span.action.stage]) for span in sorted(timeline.spans, key=lambda s: s.start)]
    step = max((len(name(span.action, chunk, most)) for span, chunk in named), default=1)
    scale = _scale(timeline, step, room)

    def at(time: float) -> int:
        return math.floor((time - start) * scale + 0.5)

    bars, reached, cut = [], [0] * timeline.ranks, 0
    for span, chunk in named:
        first, end = max(at(span.start), reached[span.rank]), at(span.end)
        if end <= first:
            continue
        text = name(span.action, chunk, most)
        if len(text) > end - first:
            text, cut = (text[:1] if most <= 2 else span.action.kind), cut + 1
        style = f"{'black' if chunk % 2 == 0 else 'bold white'} on {COLORS[span.action.kind]}"
        bars.append(Bar(span.rank, first, end, text, style))
        reached[span.rank] = end
    return _Drawing(tuple(bars), at(timeline.end), step, scale, cut, len(named) - len(bars))


def _room(columns: int | None, margin: int) -> int:
    """Characters beside the names of the rows."""
    return WIDEST if columns is None else max(1, columns - margin)


def _scale(timeline: Timeline, step: int, room: int) -> float:
    """Characters a unit of time: names fit in nine of ten actions, or in every other one where that takes too many blocks."""
    span = float(timeline.makespan) or 1.0
    finest, most = step / float(short(timeline, 10)), SEVERAL if timeline.unit else MOST
    if finest * span <= most * room:
        return finest
    return min(step / float(short(timeline, 2)), FINEST / span, sys.float_info.max)


def _heading(timeline: Timeline, drawing: _Drawing, block: Block, before: Block | None) -> list[Text]:
    """The times of a block, and what is left out before it."""

    def time(column: int) -> str:
        return f"{min(column / drawing.scale, float(timeline.makespan)):.{4 if timeline.unit else 6}g}"

    unit = " s" if timeline.unit == "s" else ""
    lines = [] if before is None else [""]
    if before is not None and before.end < block.first:
        gone = f"time {time(before.end)} to {time(block.first)}{unit}: {_actions(block.left_out)}"
        lines += [f"{gone} left out here; --output FILE.svg draws all", ""]
    return [*map(Text, lines), Text(f"time {time(block.first)} to {time(block.end)}{unit}")]


def _rows(ranks: int, bars: Sequence[Bar], block: Block, colored: bool) -> list[Text]:
    rows = [Text() for _ in range(ranks)]
    for bar in bars:
        first, end = max(bar.first, block.first), min(bar.end, block.end)
        if first >= end:
            continue
        row = rows[bar.rank]
        row.append("." * (first - block.first - len(row)))
        text, fill = bar.text, " " if colored else "-"
        if bar.first < block.end < bar.named:
            end = bar.named
        elif bar.first < block.first < bar.named:  # the block before has all of the name
            text = ""
        text = text.ljust(bar.end - bar.first, fill)
        row.append(text[first - bar.first : end - bar.first], bar.style if colored else None)
    for row in rows:
        row.append("." * (block.end - block.first - len(row)))
    return rows
