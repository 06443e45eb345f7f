"""Pipeline schedules as pure data: for each stage the order of its forwards and backwards. Nothing here runs anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from functional_par.errors import ScheduleError


@dataclass(frozen=True)
class Action:
    """One piece of work of one stage on one microbatch: ``F`` forward or ``B`` backward."""

    kind: Literal["F", "B"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Schedule = tuple[tuple[Action, ...], ...]
"""Actions of each stage, in order."""


def afab(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in order of the microbatches (GPipe with FIFO backwards).

    >>> [" ".join(map(str, row)) for row in afab(2, 3)]
    ['F0 F1 F2 B0 B1 B2', 'F0 F1 F2 B0 B1 B2']
    """
    return tuple(
        (*(Action("F", s, i) for i in range(microbatches)), *(Action("B", s, i) for i in range(microbatches)))
        for s in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """One forward, one backward (PipeDream-Flush): at most ``stages - stage`` microbatches are in flight.

    The warm-up of a stage is ``min(microbatches, stages - stage - 1)`` forwards, so fewer microbatches than stages work.

    >>> [" ".join(map(str, row)) for row in one_f_one_b(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    return tuple(_one_f_one_b(s, min(microbatches, stages - s - 1), microbatches) for s in range(stages))


def _one_f_one_b(stage: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    row = [Action("F", stage, i) for i in range(warm_up)]
    for i in range(warm_up, microbatches):
        row += [Action("F", stage, i), Action("B", stage, i - warm_up)]
    return (*row, *(Action("B", stage, i) for i in range(microbatches - warm_up, microbatches)))


_SCHEDULES = {"afab": afab, "1f1b": one_f_one_b}


def schedule_names() -> tuple[str, ...]:
    """Names that ``make_schedule`` knows."""
    return tuple(_SCHEDULES)


def make_schedule(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of that name; raises ScheduleError for an unknown one."""
    if name not in _SCHEDULES:
        raise ScheduleError(f"schedule {name!r}: it is one of {', '.join(_SCHEDULES)}.")
    return _SCHEDULES[name](stages, microbatches)
