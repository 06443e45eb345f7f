"""Timelines as files in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from functional_par.errors import ConfigError
from functional_par.pipeline.schedule import KINDS, Action
from functional_par.pipeline.timeline import Span, Timeline
from functional_par.report import files
from functional_par.report.cells import row_names

_COLORS = {"F": "rail_response", "B": "good", "I": "rail_animation", "W": "generic_work"}
_PROCESS = 0
_MICRO = 1e6
MOST = 100_000
"""Ranks, stages and microbatches."""
LATEST = 1e18
"""Microseconds."""


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
    reader = _Reader(f"{what} {path}")
    data = reader.json(path)
    if not isinstance(data, Mapping) or not isinstance(data.get("traceEvents"), list):
        raise reader.wrong("", "an object with a list traceEvents is expected, as --trace-file writes it")
    about = data.get("otherData", {})
    if not isinstance(about, Mapping):
        raise reader.wrong("otherData", "an object is expected")
    events = data["traceEvents"]
    labels: dict[int, str] = {}
    spans: list[Span] = []
    for at, event in enumerate(events):
        where = f"traceEvents[{at}]"
        if not isinstance(event, Mapping) or event.get("ph") not in ("M", "X"):
            raise reader.wrong(where, "a complete event (ph X) or one of metadata (ph M) is expected")
        if event["ph"] == "X":
            spans.append(reader.span(event, where))
        elif event.get("name") == "thread_name":
            labels[reader.count(event, "tid", where, MOST - 1)] = reader.label(event, where)
    rows = max([span.rank for span in spans] + list(labels), default=-1) + 1
    ranks = reader.count(about, "ranks", "otherData", MOST) if "ranks" in about else rows
    if ranks < rows or not spans:
        raise reader.wrong("", f"{len(spans)} spans on {rows} ranks do not fit the {ranks} ranks of otherData")
    spans.sort(key=lambda span: (span.rank, span.start, span.end))
    reader.apart(spans)
    schedule, unit = about.get("schedule", ""), about.get("unit", "s")
    if not isinstance(schedule, str) or not schedule.isprintable() or unit not in ("s", ""):
        raise reader.wrong("otherData", "schedule is a text on one line, and unit is s, or empty for units of work")
    timeline = Timeline(ranks, tuple(spans), unit)
    pp, microbatches = (
        reader.count(about, key, "otherData", MOST) if key in about else 0 for key in ("pp", "microbatches")
    )
    names = tuple(labels.get(rank, f"rank {rank}") for rank in range(ranks))
    return Trace(timeline, schedule, pp, microbatches, names)


@dataclass(frozen=True)
class _Reader:
    """Reads plain data, and names the file and the place of what is wrong."""

    file: str

    def wrong(self, where: str, why: str) -> ConfigError:
        return ConfigError(f"{self.file}{f', {where}' if where else ''}: {why}.")

    def json(self, path: str) -> Any:
        def no_number(word: str) -> NoReturn:
            raise ValueError(f"{word} is no number of JSON")

        try:
            with open(path, encoding="utf-8") as file:
                return json.load(file, parse_constant=no_number)
        except OSError as error:
            raise self.wrong("", f"it cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise self.wrong("", f"it holds no JSON: {error}") from None

    def span(self, event: Mapping[str, Any], where: str) -> Span:
        args = event.get("args")
        if not isinstance(args, Mapping) or args.get("kind") not in tuple(KINDS):
            raise self.wrong(where, "its args have no kind F, B, I or W")
        inside = f"{where}.args"
        action = Action(
            self.count(args, "stage", inside, MOST), args["kind"], self.count(args, "microbatch", inside, MOST)
        )
        start, length = self.time(event, "ts", where), self.time(event, "dur", where)
        return Span(self.count(event, "tid", where, MOST - 1), action, start / _MICRO, (start + length) / _MICRO)

    def count(self, data: Mapping[str, Any], key: str, where: str, most: int) -> int:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.wrong(where, f"{key} is {value!r}; an integer from 0 to {most} is expected")
        return value

    def time(self, data: Mapping[str, Any], key: str, where: str) -> float:
        value = data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LATEST:
            raise self.wrong(where, f"{key} is {value!r}; microseconds from 0 to {LATEST:g} are expected")
        return float(value)

    def label(self, event: Mapping[str, Any], where: str) -> str:
        args = event.get("args")
        text = args.get("name") if isinstance(args, Mapping) else None
        if not isinstance(text, str) or not text.isprintable():
            raise self.wrong(where, "the name of a row is expected in its args, a text on one line")
        return text

    def apart(self, spans: Sequence[Span]) -> None:
        """A rank does one thing at a time, but for a microsecond's rounding."""
        for before, after in pairwise(spans):
            if before.rank == after.rank and after.start < before.end - 1e-6:
                raise self.wrong(
                    f"rank {after.rank}",
                    f"{after.action} starts before {before.action} ends; a rank does one at a time",
                )
