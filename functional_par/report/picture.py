"""A timeline as SVG, PDF or PNG, drawn by matplotlib without its global state: the same timeline makes the same bytes."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from functional_par.errors import ConfigError
from functional_par.pipeline.schedule import KINDS
from functional_par.pipeline.timeline import Timeline
from functional_par.report.cells import chunks, kinds, most_chunks, row_names, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
COLORS: Mapping[str, str] = MappingProxyType({"F": "#5b9bd5", "B": "#70ad47", "I": "#f2a93b", "W": "#a98bc8"})
CELL, ROW = 0.2, 0.34
"""Inches of a short action's width, and of a row's height."""
NARROWEST, WIDEST, TALLEST = 7.0, 60.0, 60.0
DPI = 120
MOST_NAMES = 20_000
"""Spans that get their microbatch as a text."""


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture.

    Attributes:
        timeline: simulated or measured.
        title: above it.
        labels: names of the rows, ``rank 0`` and so on if left out.
    """

    timeline: Timeline
    title: str = ""
    labels: Sequence[str] = ()


def format_of(path: str, what: str = "--output") -> str:
    """The format that the end of a file's name asks for; ConfigError for another. ``what`` is the flag that names the file."""
    found = Path(path).suffix.lower().removeprefix(".")
    if found not in FORMATS:
        raise ConfigError(f"{what} {path}: the name of a picture ends in .svg, .png or .pdf, or in .json for Perfetto.")
    return found


def picture(timeline: Timeline, form: str = "svg", title: str = "", labels: Sequence[str] = ()) -> bytes:
    """The picture of a timeline: a row a rank, the microbatch in each action, the kind and the chunk by colour.

    Args:
        timeline: simulated or measured.
        form: ``svg``, ``png`` or ``pdf``.
        title: above it.
        labels: names of the rows, ``rank 0`` and so on if left out.

    Returns:
        The bytes of the file.

    Raises:
        ConfigError: if matplotlib is not there.
    """
    return pictures([Panel(timeline, title, labels)], form)


def pictures(panels: Sequence[Panel], form: str = "svg") -> bytes:
    """Timelines one above the other, with one axis of time and the same colours; else as ``picture``, one panel at least.

    Returns:
        The bytes of the file.

    Raises:
        ConfigError: if matplotlib is not there.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "pictures are drawn by matplotlib, which is not installed here: pip install 'functional_par[pictures]'."
        ) from None
    # Texts stay texts, and names inside the file do not depend on the process.
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "functional_par",
        "pdf.fonttype": 42,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(style):
        timelines = [panel.timeline for panel in panels]
        ranks, longest = (
            [timeline.ranks for timeline in timelines],
            max(timeline.makespan for timeline in timelines) or 1,
        )
        most = max(map(most_chunks, timelines))
        width = min(WIDEST, max(NARROWEST, CELL * longest / min(map(short, timelines)) + 1.5))
        height = min(TALLEST, ROW * sum(ranks) + 0.6 * len(panels) + 0.7)
        figure = Figure(figsize=(width, height), layout="constrained")
        rows = figure.subplots(len(panels), squeeze=False, height_ratios=[max(number, 1) for number in ranks])[:, 0]
        for axes, panel in zip(rows, panels, strict=True):
            _draw(axes, panel.timeline, most, (width - 1.5) / longest)
            _frame(axes, panel, longest)
        rows[-1].set_xlabel("seconds" if any(timeline.unit == "s" for timeline in timelines) else "time")
        _legend(figure, timelines, most)
        out = io.BytesIO()
        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
        figure.savefig(out, format=form, dpi=DPI, metadata=stamp)
    return out.getvalue()


def _draw(axes: Axes, timeline: Timeline, most: int, inches: float) -> None:
    """``most`` stages on a rank, ``inches`` for a unit of time."""
    places, zero = chunks(timeline), timeline.start
    groups: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        chunk = places[span.rank, span.action.stage]
        groups.setdefault((span.action.kind, chunk, span.rank), []).append((span.start - zero, span.end - span.start))
    for (kind, chunk, rank), bars in sorted(groups.items()):
        axes.broken_barh(
            bars, (rank - 0.45, 0.9), facecolors=_color(kind, chunk, most), edgecolor="white", linewidth=0.4
        )
    for span in timeline.spans if len(timeline.spans) <= MOST_NAMES else ():
        text, (start, length) = str(span.action.microbatch), (span.start - zero, span.end - span.start)
        if length * inches >= 0.06 * len(text):
            axes.text(start + length / 2, span.rank, text, ha="center", va="center", fontsize=6)


def _frame(axes: Axes, panel: Panel, longest: float) -> None:
    ranks = panel.timeline.ranks
    axes.set_yticks(range(ranks), row_names(panel.timeline, panel.labels))
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, longest)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, timelines: Sequence[Timeline], most: int) -> None:
    from matplotlib.patches import Patch

    found = {kind for timeline in timelines for kind in kinds(timeline)}
    patches = [
        Patch(facecolor=_color(kind, chunk, most), label=KINDS[kind] + (f", chunk {chunk}" if most > 1 else ""))
        for kind in KINDS
        if kind in found
        for chunk in range(most)
    ]
    if patches:
        figure.legend(handles=patches, loc="outside lower left", ncols=min(len(patches), 4), fontsize=7, frameon=False)


def _color(kind: str, chunk: int, most: int) -> tuple[float, float, float]:
    """The colour of a kind, lighter for later chunks."""
    code = COLORS[kind]
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    return colorsys.hls_to_rgb(hue, light + (0.92 - light) * chunk / most, saturation)
