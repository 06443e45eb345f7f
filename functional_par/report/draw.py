"""Timelines to a file, in the format that its name asks for."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath

from functional_par.pipeline.schedule import Schedule
from functional_par.report import chrome_trace, files
from functional_par.report.picture import Panel, format_of, pictures

JSON = ".json"


def check(path: str | PathLike[str], what: str = "draw") -> None:
    """Raises ConfigError for a name that asks for no format that there is. ``what`` names the flag, for messages."""
    if not fspath(path).lower().endswith(JSON):
        format_of(fspath(path), what)


def draw(
    path: str | PathLike[str], panels: Sequence[Panel], schedule: Schedule | None = None, what: str = "draw"
) -> None:
    """Draw all panels, one above the other, to an .svg, .png or .pdf; or write the first to a .json for Perfetto.

    Args:
        path: the file.
        panels: timelines, with what is written above them.
        schedule: what the first one ran, if it is known, for the .json.
        what: the flag that names the file, for messages.

    Raises:
        ConfigError: another ending, a file that cannot be written, or no matplotlib for a picture.
    """
    check(path, what)
    name = fspath(path)
    if not name.lower().endswith(JSON):
        files.write(name, pictures(panels, format_of(name, what)), what)
        return
    chrome_trace.write_trace(
        name,
        panels[0].timeline,
        schedule=schedule.name if schedule else "",
        pp=schedule.ranks if schedule else 0,
        microbatches=schedule.microbatches if schedule else 0,
        labels=panels[0].labels,
        what=what,
    )
