"""Rows out of what was measured: medians, ratios, and whose losses agree. Nothing here runs anything."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .race import Measured
from .worker import Turn

Row = dict[str, Any]
TOLERANCE = 1e-3
"""Relative distance of losses up to which contenders train alike."""
MB = 1e6


def row_of(model: str, measured: Measured) -> Row:
    """What one contender did, in the numbers of the table.

    ``ms`` is the median over turns of the time of a step, ``spread`` the distance between the quartiles, ``best`` the
    minimum; ``cpu_ms`` is processor time of all processes; ``rss_mb`` is peak resident memory of the rank that needs most,
    for ranks that are threads their share of ``process_mb``, the peak of the process; ``bytes`` are those that the rank which
    sends most puts on the wire in a step; ``loss`` is that of the last step.
    """
    contender, turns, times = measured.contender, measured.turns, measured.ms()
    process = max(part.rss for part in turns[-1]) / MB
    sent = None if not measured.sent or None in measured.sent else max(n for n in measured.sent if n is not None)
    losses = [loss for part in turns[-1] for loss in part.losses]
    return {
        "model": model,
        "layout": contender.layout,
        "who": contender.who,
        "ms": statistics.median(times),
        "spread": _spread(times),
        "best": min(times),
        "cpu_ms": statistics.median(_cpu(turn) for turn in turns) / measured.pace.steps * 1000,
        "rss_mb": process / contender.inside,
        "process_mb": process,
        "bytes": sent,
        "loss": statistics.fmean(losses) if losses else None,
        "rounds": len(turns),
        **measured.info,
    }


def compared(rows: Iterable[Row]) -> list[Row]:
    """The rows with whether their losses agree, and with ratios.

    ``agrees``: the loss is that of the limit, or where it did not race the median. ``vs_limit``: time over that of the limit
    on one thread (one rank) or on two (two ranks; the idle share of the schedule is taken off). ``vs_peer``: how many times
    faster than the best of torch's and jax's rows in the same layout; ``rss_vs_peer``: memory over that of the leanest.
    """
    rows = list(rows)
    reference = {row["model"]: _reference([each for each in rows if each["model"] == row["model"]]) for row in rows}
    rows = [row | {"agrees": _agrees(row["loss"], reference[row["model"]])} for row in rows]
    return [row | _ratios(row, [each for each in rows if _same(each, row)]) for row in rows]


def is_peer(row: Row) -> bool:
    """Whether a user could pick this instead of ours."""
    return row["who"].startswith(("torch", "jax"))


def peers(rows: Iterable[Row]) -> list[Row]:
    """The peers that train right."""
    return [row for row in rows if is_peer(row) and row["agrees"]]


def _ratios(row: Row, layout: Sequence[Row]) -> Row:
    """Against the others of the same layout."""
    limits = [each for each in layout if each["who"] == ("limit" if row["layout"] == "one" else "limit 2 threads")]
    busy = 1.0 - (row.get("bubble") or 0.0)
    right = peers(layout)
    return {
        "vs_limit": row["ms"] * busy / limits[0]["ms"] if limits else None,
        "vs_peer": min(each["ms"] for each in right) / row["ms"] if right else None,
        "rss_vs_peer": row["rss_mb"] / min(each["rss_mb"] for each in right) if right else None,
    }


def _same(a: Row, b: Row) -> bool:
    return (a["model"], a["layout"]) == (b["model"], b["layout"])


def _reference(rows: Sequence[Row]) -> float | None:
    """The loss that is right."""
    limits = [row["loss"] for row in rows if row["who"].startswith("limit")]
    known = limits or [row["loss"] for row in rows if row["loss"] is not None]
    return statistics.median_low(known) if known else None


def _agrees(loss: float | None, reference: float | None) -> bool:
    return loss is not None and reference is not None and abs(loss - reference) <= TOLERANCE * abs(reference)


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low


def _cpu(turn: Sequence[Turn]) -> float:
    return sum(part.cpu for part in turn)


def failures(out: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Who is out, and why, for people: of each layout, reasons by name."""
    return [f"{layout}, {who}: {reason}" for layout, found in out.items() for who, reason in found.items()]
