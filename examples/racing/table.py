"""The table on the terminal, and what has to be said below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from .results import TOLERANCE, Row, peers

CAPTION = (
    "ms: median a step, its quartiles apart, and the fastest turn. cpu: of all processes. MB: peak of a rank; ranks that are "
    "threads share that of their process. limit: time over the hand-written loop's on as many threads (one or two), without "
    "the idle share of a pipeline. peer: how often as fast as the best of torch and jax (*) here; its memory likewise."
)


def table_of(rows: Sequence[Row]) -> Table:
    """One line a row, a section a layout."""
    columns = ("model", "layout", "who", "ms", "spread", "best", "cpu ms", "MB", "MB sent", "limit", "peer", "memory")
    table = Table(title="one step", caption=CAPTION, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in columns[:3] else "right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and (before["model"], before["layout"]) != (row["model"], row["layout"]):
            table.add_section()
        table.add_row(*_cells(row, rows))
    return table


def notes(rows: Sequence[Row]) -> list[str]:
    """Whether everyone trained alike, for each model; who did not does not count as a peer."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        here = [row for row in rows if row["model"] == model]
        wrong = [row for row in here if not row["agrees"]]
        right = [row["loss"] for row in here if row["agrees"]]
        if right:
            lines.append(f"{model}: last loss {right[0]:.5f} of {len(right)} rows, equal to {TOLERANCE:g}")
        for row in wrong:
            lines.append(
                f"{model}, {row['layout']}: {row['who']} does not train right: loss {row['loss']}; it is no best peer"
            )
    return lines


def _cells(row: Row, rows: Iterable[Row]) -> list[str]:
    right = peers(each for each in rows if (each["model"], each["layout"]) == (row["model"], row["layout"]))
    best = min((each["ms"] for each in right), default=None)
    mark = "*" if row in right and row["ms"] == best else "" if row["agrees"] else " (wrong)"
    sent = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.2f}"
    numbers = [f"{row[name]:.1f}" for name in ("ms", "spread", "best", "cpu_ms")]
    ratios = [_ratio(row[name]) for name in ("vs_limit", "vs_peer", "rss_vs_peer")]
    return [row["model"], row["layout"], row["who"] + mark, *numbers, f"{row['rss_mb']:.0f}", sent, *ratios]


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}x"
