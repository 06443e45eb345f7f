"""Schedules in CSV files as torch's pipelining writes and reads them: a row for each rank, an action in each cell."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from os import PathLike
from pathlib import Path

from functional_par.errors import ScheduleError
from functional_par.pipeline.schedule import Action, Row, Schedule, shortened

_DERIVED = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*")
_CELL = re.compile(r"\d+[FBIW]\d+")
_SEVERAL = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_schedule(path: str | PathLike[str]) -> Schedule:
    """The schedule in a file, in either format of torch (compute_only or compute_comms); its name is the file's.

    Empty cells are idle time, and left out. So are communication and collectives (``SEND_F``, ``RECV_B``, ``UNSHARD``, ...),
    which follow from the actions. ``(0F1;1B0)OVERLAP_F_B`` is its parts, in order. A row of an empty cell is a rank without
    stages; blank lines at the end are no rows.

    Raises:
        ScheduleError: a file that cannot be read, or a cell that is no action; names the file, row, column and cell.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
        rows = list(csv.reader(text.splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"schedule file {path}: it cannot be read as CSV: {error}.") from error
    while rows and not rows[-1]:
        del rows[-1]
    if not rows:
        raise ScheduleError(f"schedule file {path}: it is empty. Write a row for each rank, with actions such as 0F0.")
    return Schedule(Path(path).name, tuple(tuple(_actions(path, i, row)) for i, row in enumerate(rows, start=1)))


def write_schedule(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a file that ``read_schedule`` reads, and torch as compute_only."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.write(as_csv(schedule.rows, "\r\n"))


def as_csv(rows: Sequence[Row], end: str) -> str:
    """Rows of actions as lines of cells; a rank without any has one empty cell, since a blank line would be no row."""
    text = StringIO()
    csv.writer(text, lineterminator=end).writerows([*map(str, row)] or [""] for row in rows)
    return text.getvalue()


def _actions(path: str | PathLike[str], row: int, cells: list[str]) -> Iterator[Action]:
    for column, cell in enumerate(cells, start=1):
        try:
            yield from _parse(cell.strip())
        except ValueError as error:
            why = _separator(cell) or (error if isinstance(error, ScheduleError) else f"{shortened(cell)}: {error}.")
            where = f"row {row}, column {column} (counted from 1; rank {row - 1})"
            raise ScheduleError(f"schedule file {path}, {where}: {why}") from error


def _separator(cell: str) -> str | None:
    """What to say if all of a row is in one cell."""
    for mark, called in {";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}.items():
        parts = [part.strip() for part in cell.split(mark) if part.strip()]
        if len(parts) > 1 and all(_CELL.fullmatch(part) or _DERIVED.fullmatch(part) for part in parts):
            return f"its cells are separated by {called}, as in {shortened(cell, 30)}. Separate them by commas."
    return None


def _parse(cell: str) -> Iterator[Action]:
    if (several := _SEVERAL.fullmatch(cell)) is not None:
        for part in several[1].split(";"):
            if not _DERIVED.fullmatch(part.strip()):
                yield Action.parse(part.strip())
    elif cell and not _DERIVED.fullmatch(cell):
        yield Action.parse(cell)
