"""Timelines as files in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from functional_par.pipeline.schedule import KINDS
from functional_par.pipeline.timeline import Span, Timeline
from functional_par.report import files
from functional_par.report.cells import row_names
from functional_par.report.trace_reader import MOST, Reader

_COLORS = {"F": "rail_response", "B": "good", "I": "rail_animation", "W": "generic_work"}
_PROCESS = 0
_MICRO = 1e6


@dataclass(frozen=True)
class Trace:
    """What a trace file holds.

    Attributes:
        timeline: of one run of a schedule. Its first start is 0 in the file.
        schedule: the schedule's name; "" if it is not known.
        pp: ranks of the pipeline; there may be several pipelines side by side. 0 if it is not known.
        microbatches: of the schedule; 0 if it is not known.
        labels: names of the rows.
    """

    timeline: Timeline
    schedule: str = ""
    pp: int = 0
    microbatches: int = 0
    labels: tuple[str, ...] = ()


def write_trace(
    path: str,
    timeline: Timeline,
    *,
    schedule: str = "",
    pp: int = 0,
    microbatches: int = 0,
    labels: Sequence[str] = (),
    what: str = "trace file",
) -> None:
    """Write a timeline, whole or not at all: one row a rank, one event a span, times in microseconds from the first start.

    Args:
        path: the file; only this one is written.
        timeline: clocks of all ranks aligned. A unit of work of a simulated one is written as a second.
        schedule, pp, microbatches: what ran, see ``Trace``.
        labels: names of the rows, such as ``rank 3: pp 1, dp 0, tp 1``; ``rank 3`` for those left out.
        what: the flag or key that names the file, for messages.

    Raises:
        ConfigError: with the reason, if it cannot be written.
    """
    data = encode(Trace(timeline, schedule, pp, microbatches, tuple(labels)))
    files.write(path, json.dumps(data, allow_nan=False).encode(), what)


def encode(trace: Trace) -> dict[str, Any]:
    """The object that the file holds."""
    timeline = trace.timeline
    about = {
        "schedule": trace.schedule,
        "pp": trace.pp,
        "microbatches": trace.microbatches,
        "ranks": timeline.ranks,
        "unit": timeline.unit,
    }
    title = f"functional_par {trace.schedule}".rstrip()
    events = [{"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": title}}]
    for rank, label in enumerate(row_names(timeline, trace.labels)):
        row = {"ph": "M", "pid": _PROCESS, "tid": rank}
        events.append({**row, "name": "thread_name", "args": {"name": label}})
        events.append({**row, "name": "thread_sort_index", "args": {"sort_index": rank}})
    events += [_event(span, timeline.start) for span in timeline.spans]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _event(span: Span, start: float) -> dict[str, Any]:
    stage, kind, microbatch = span.action
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": KINDS[kind],
        "pid": _PROCESS,
        "tid": span.rank,
        "ts": (span.start - start) * _MICRO,
        "dur": (span.end - span.start) * _MICRO,
        "cname": _COLORS[kind],
        "args": {"stage": stage, "kind": kind, "microbatch": microbatch},
    }


def read_trace(path: str) -> Timeline:
    """The timeline of a file that ``write_trace`` wrote. Raises ConfigError as ``load`` does."""
    return load(path).timeline


def load(path: str, what: str = "trace file") -> Trace:
    """What a trace file holds.

    Raises:
        ConfigError: naming the file, and the event, if it cannot be read or ``write_trace`` writes no such thing.
    """
    reader = Reader(f"{what} {path}")
    events, about = reader.parts(path)
    spans, labels = _rows(reader, events)
    rows = max([span.rank for span in spans] + list(labels), default=-1) + 1
    ranks = reader.count(about, "ranks", "otherData", MOST) if "ranks" in about else rows
    if ranks < rows or not spans:
        raise reader.wrong("", f"{len(spans)} spans on {rows} ranks do not fit the {ranks} ranks of otherData")
    schedule, unit = about.get("schedule", ""), about.get("unit", "s")
    if not isinstance(schedule, str) or not schedule.isprintable() or unit not in ("s", ""):
        raise reader.wrong("otherData", "schedule is a text on one line, and unit is s, or empty for units of work")
    pp, microbatches = (
        reader.count(about, key, "otherData", MOST) if key in about else 0 for key in ("pp", "microbatches")
    )
    names = tuple(labels.get(rank, f"rank {rank}") for rank in range(ranks))
    return Trace(Timeline(ranks, tuple(spans), unit), schedule, pp, microbatches, names)


def _rows(reader: Reader, events: Sequence[Any]) -> tuple[list[Span], dict[int, str]]:
    """The spans, in order on each rank, and the names of the ranks."""
    labels: dict[int, str] = {}
    spans: list[Span] = []
    for at, event in enumerate(events):
        where = f"traceEvents[{at}]"
        if not isinstance(event, Mapping) or event.get("ph") not in ("M", "X"):
            raise reader.wrong(where, "a complete event (ph X) or one of metadata (ph M) is expected")
        if event["ph"] == "X":
            start, length = (reader.time(event, key, where) / _MICRO for key in ("ts", "dur"))
            spans.append(
                Span(reader.count(event, "tid", where, MOST - 1), reader.action(event, where), start, start + length)
            )
        elif event.get("name") == "thread_name":
            labels[reader.count(event, "tid", where, MOST - 1)] = reader.label(event, where)
    spans.sort(key=lambda span: (span.rank, span.start, span.end))
    _check_apart(reader, spans)
    return spans, labels


def _check_apart(reader: Reader, spans: Sequence[Span]) -> None:
    """A rank does one thing at a time, but for a microsecond's rounding."""
    for before, after in pairwise(spans):
        if before.rank == after.rank and after.start < before.end - 1 / _MICRO:
            raise reader.wrong(
                f"rank {after.rank}", f"{after.action} starts before {before.action} ends; a rank does one at a time"
            )
