"""A timeline as text: a row a rank, time to the right, idle time as dots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.text import Text

from functional_par.pipeline.schedule import KINDS
from functional_par.pipeline.timeline import Timeline
from functional_par.report.cells import chunks, kinds, most_chunks, name, row_names, short

COLORS: Mapping[str, str] = MappingProxyType({"F": "blue", "B": "green", "I": "yellow", "W": "magenta"})
WIDEST = 1000
"""Columns where nothing limits them."""


def gantt(timeline: Timeline, columns: int | None = None, labels: Sequence[str] = (), colored: bool = False) -> Text:
    """The picture, one line a rank. Its ``plain`` text is complete: colours only repeat what letters say.

    Args:
        timeline: simulated or measured.
        columns: the largest width, names included; None is as wide as it takes. A picture that is wider is scaled: an action
            whose name does not fit its place shows its kind alone, and one without a place is left out.
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
    rows = _rows(timeline, _scale(timeline, _room(timeline, columns, labels)), colored)
    return Text("\n").join(Text(label.ljust(margin)) + row for label, row in zip(names, rows, strict=True))


def legend(timeline: Timeline, columns: int | None = None, labels: Sequence[str] = ()) -> str:
    """What the letters mean, and whether some names had no room."""
    found = ", ".join(f"{kind} {KINDS[kind]}" for kind in kinds(timeline))
    most = most_chunks(timeline)
    if most == 2:
        found += "; small letters: the second stage of the rank"
    elif most > 2:
        found += "; before the letter the stage"
    scaled = _scale(timeline, _room(timeline, columns, labels)) < _wanted(timeline)
    return f"{found}; after it the microbatch" + ("; scaled, names that do not fit are cut" if scaled else "")


def _wanted(timeline: Timeline) -> float:
    """Characters a unit of time at which names fit."""
    most, places = most_chunks(timeline), chunks(timeline)
    longest = max((len(name(s.action, places[s.rank, s.action.stage], most)) for s in timeline.spans), default=1)
    return longest / short(timeline)


def _room(timeline: Timeline, columns: int | None, labels: Sequence[str]) -> int:
    """Characters beside the names of the rows."""
    margin = max(map(len, row_names(timeline, labels)), default=0) + 2
    return WIDEST if columns is None else max(1, columns - margin)


def _scale(timeline: Timeline, room: int) -> float:
    wanted = _wanted(timeline)
    limit = room / (timeline.makespan or 1.0)
    if wanted <= limit:
        return wanted
    cell = limit * short(timeline)
    # Cells of equal actions are equally wide if there is a whole number of characters for one.
    return math.floor(cell) / short(timeline) if cell >= 1 and not timeline.unit else limit


def _rows(timeline: Timeline, scale: float, colored: bool) -> list[Text]:
    start = timeline.start

    def at(time: float) -> int:
        return math.floor((time - start) * scale + 0.5)

    most, places, width = most_chunks(timeline), chunks(timeline), at(timeline.end)
    rows = [Text() for _ in range(timeline.ranks)]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        row, chunk = rows[span.rank], places[span.rank, span.action.stage]
        first, end = max(at(span.start), len(row)), at(span.end)
        if end <= first:
            continue
        row.append("." * (first - len(row)))
        text = name(span.action, chunk, most)
        if len(text) > end - first:
            text = text[:1] if most <= 2 else span.action.kind
        style = f"{'black' if chunk % 2 == 0 else 'bold white'} on {COLORS[span.action.kind]}"
        row.append(text.ljust(end - first, " " if colored else "-"), style if colored else None)
    for row in rows:
        row.append("." * (width - len(row)))
    return rows
