"""How long the actions of a schedule and its messages take: numbers, measured or counted or just ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from functional_par.errors import ScheduleError
from functional_par.pipeline.schedule import Action

LARGEST = 10**100
Each = Any  # a number, or a sequence with one for each stage; exact numbers (int, Fraction) stay exact


@dataclass(frozen=True)
class Costs:
    """Time of each kind of action: one number, or a sequence with one for each stage. Any unit; not negative.

    Attributes:
        forward: of ``F``.
        input_backward: of ``I``.
        weight_backward: of ``W``; ``B`` takes ``I`` and ``W`` together.
        transfer: of a message between two ranks, a number. On one rank stages hand over at once.

    >>> Costs(forward=[1, 2]).of(Action(1, "F", 0)), Costs(input_backward=2).of(Action(0, "B", 3))
    (2, 3.0)
    """

    forward: Each = 1.0
    input_backward: Each = 1.0
    weight_backward: Each = 1.0
    transfer: Any = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            several = isinstance(given, Sequence) and not isinstance(given, str) and field.name != "transfer"
            for number in given if several else [given]:
                # A bound far beyond any time, below which sums and products are finite.
                if isinstance(number, bool) or not isinstance(number, Real) or not _in_range(number):
                    raise ScheduleError(
                        f"Costs({field.name}={given!r}): {number!r} is no time. Give a finite number of at least 0"
                        f"{'' if field.name == 'transfer' else ', or one for each stage'}."
                    )

    def of(self, action: Action) -> Any:
        """Time that an action takes."""
        kinds = {"F": ("forward",), "I": ("input_backward",), "W": ("weight_backward",)}
        return sum(
            self._one(name, action.stage) for name in kinds.get(action.kind, ("input_backward", "weight_backward"))
        )

    def check(self, stages: int) -> Costs:
        """Itself, if every sequence has an entry for each stage."""
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, Sequence) and len(given) != stages:
                raise ScheduleError(
                    f"Costs({field.name}={list(given)}): {len(given)} numbers for {stages} stages. Give one number for "
                    "all stages, or one for each."
                )
        return self

    def _one(self, name: str, stage: int) -> Any:
        given = getattr(self, name)
        return given[stage] if isinstance(given, Sequence) else given


def _in_range(number: Any) -> bool:
    return bool(0 <= number < LARGEST)
