"""A pipeline schedule as pure data: for each rank the order of its actions. Nothing here runs anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, NamedTuple

from functional_par.errors import ScheduleError

Kind = Literal["F", "B", "I", "W"]

KINDS: Mapping[Kind, str] = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "input-backward", "W": "weight-backward"}
)
"""What an action does: ``B`` is ``I`` and ``W`` in one."""

_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One piece of work: a stage, what it does, and the microbatch it does it on.

    ``F`` forward; ``B`` whole backward; or the backward in two: ``I`` the gradients of the stage's inputs, on which the stage
    before waits, and ``W`` those of its weights, on which nobody does (arXiv 2401.10241). What can wait for ``W`` are weights
    that a layer passes to ``fp.nn`` as they are; the gradients of others come in ``I``.

    >>> str(Action(2, "F", 0)), Action.parse("2F0")
    ('2F0', Action(stage=2, kind='F', microbatch=0))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def words(self) -> str:
        """For people: ``forward of microbatch 3 on stage 1``."""
        return f"{KINDS[self.kind]} of microbatch {self.microbatch} on stage {self.stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``str`` writes, in the notation of torch's pipelining; ScheduleError for anything else."""
        found = _CELL.fullmatch(text)
        if found is None:
            raise ScheduleError(
                f"{shortened(text)} is no action: write stage, kind and microbatch, as in 2F0; kinds are F (forward), B "
                "(backward), I (input-backward) and W (weight-backward)."
            )
        return cls(int(found[1]), found[2], int(found[3]))  # type: ignore[arg-type]  # the pattern has the kinds


Row = tuple[Action, ...]

_ROWS = "write one list of actions for each rank, such as [['0F0', '0B0'], ['1F0', '1B0']]"


def shortened(cell: object, most: int = 60) -> str:
    """What somebody wrote for an action, no longer than a message bears."""
    text = repr(cell)
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order. Sends and receives follow from them: see ``messages``.

    Attributes:
        name: for people.
        rows: one a rank. A stage is on the rank that runs its actions; a rank may have several stages (chunks), or none.
    """

    name: str
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple) or not all(isinstance(row, tuple) for row in self.rows):
            object.__setattr__(self, "rows", Schedule.of(self.name, self.rows).rows)

    @classmethod
    def of(cls, name: str, rows: Iterable[Iterable[Action | str]]) -> Schedule:
        """A schedule from rows of actions, or of their text. Raises ScheduleError with the place of what is neither.

        >>> Schedule.of("mine", [["0F0", "0B0"], ["1F0", "1B0"]]).placement
        (0, 1)
        """
        if isinstance(rows, str) or not isinstance(rows, Iterable):
            raise ScheduleError(f"schedule {name}: {shortened(rows)} is no list of rows; {_ROWS}.")
        return cls(name, tuple(_row(name, rank, row) for rank, row in enumerate(rows)))

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """Number of stages: one more than the largest that is named."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches: one more than the largest that is named."""
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage. Raises ScheduleError for a stage on no rank, or on two."""
        homes: dict[int, set[int]] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                homes.setdefault(action.stage, set()).add(rank)
        for stage in range(self.stages):
            if len(found := homes.get(stage, set())) != 1:
                where = (
                    f"is on the ranks {', '.join(map(str, sorted(found)))}" if found else "has no action on any rank"
                )
                raise ScheduleError(
                    f"schedule {self.name}: stage {stage} {where}; every stage from 0 to {self.stages - 1} has all its "
                    "actions on one rank."
                )
        return tuple(min(homes[stage]) for stage in range(self.stages))

    @property
    def forward_only(self) -> Schedule:
        """The same without its backwards: what evaluation runs."""
        return Schedule(self.name, tuple(tuple(a for a in row if a.kind == "F") for row in self.rows))

    def __str__(self) -> str:
        """One line a rank."""
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def _row(name: str, rank: int, row: object) -> Row:
    if isinstance(row, str) or not isinstance(row, Iterable):
        raise ScheduleError(f"schedule {name}, rank {rank}: {shortened(row)} is no list of actions; {_ROWS}.")
    actions = []
    for at, cell in enumerate(row):
        try:
            actions.append(Action.parse(cell) if isinstance(cell, str) else Action(*cell))
        except (TypeError, ValueError) as error:
            why = str(error) if isinstance(error, ScheduleError) else f"{shortened(cell)} is no action, such as '2F0'."
            raise ScheduleError(f"schedule {name}, rank {rank}, action {at} (counted from 0): {why}") from error
    return tuple(actions)


Edges = tuple[tuple[int, int], ...]
"""Pairs of stages (producer, consumer) between which activations go forward and cotangents back; producer < consumer."""


def chain(stages: int) -> Edges:
    """Every stage feeds the next.

    >>> chain(3)
    ((0, 1), (1, 2))
    """
    return tuple((stage, stage + 1) for stage in range(stages - 1))
