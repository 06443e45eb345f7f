"""The race: contenders are processes that stay alive and take turns, so that all of them see the same machine.

A contender that fails, hangs or does not fit into memory is out, with its reason, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from .setting import Contender
from .team import Out, Team
from .worker import Turn

WARM_UP = 2
"""Turns after the start that are not counted."""
SPARE = 1 << 30
"""Bytes of memory that nobody is to use."""


@dataclass(frozen=True)
class Pace:
    """How a race goes: counted turns of each contender, steps in a turn, and seconds that an answer may take."""

    rounds: int = 7
    steps: int = 1
    timeout: float = 300.0


@dataclass(frozen=True)
class Measured:
    """What a contender did.

    Attributes:
        pace: of the race.
        turns: counted ones; of each, the part of every process.
        sent: bytes of each rank in a step, None where not known.
        info: what it said about itself.
    """

    contender: Contender
    pace: Pace
    turns: list[list[Turn]] = field(default_factory=list)
    sent: list[int | None] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    def ms(self) -> list[float]:
        """Of each turn, milliseconds a step, from the first rank that starts to the last that ends."""
        return [
            1000 * (max(part.end for part in turn) - min(part.start for part in turn)) / self.pace.steps
            for turn in self.turns
        ]


class Race:
    """Contenders of one layout. ``out`` has those that could not go on, with the reason."""

    def __init__(self, sizes: Mapping[str, int], pace: Pace, say: Callable[[str], None] = lambda line: None) -> None:
        self.measured: dict[str, Measured] = {}
        self.out: dict[str, str] = {}
        self._sizes, self._pace, self._say = sizes, pace, say
        self._teams: dict[str, Team] = {}
        self._largest = 0

    def run(self, contenders: Iterable[Contender]) -> None:
        """Start all, let them take turns, and end them."""
        try:
            for contender in contenders:
                self._guard(contender.who, lambda c=contender: self._start(c))
            for number in range(self._pace.rounds):
                self._round(number)
            for who, measured in list(self.measured.items()):
                self._guard(who, lambda who=who, to=measured.sent: to.extend(chain(*self._teams[who].ask("sent"))))
        finally:
            for team in self._teams.values():
                team.close()

    def _start(self, contender: Contender) -> None:
        """Start a contender and warm it up: its first steps allocate, trace and compile."""
        if (free := _available()) is not None and free < self._largest + SPARE:
            raise Out(f"not started: {free >> 20} MB of memory are left; let fewer contenders run (--who)")
        self._say(f"{contender.who} starts")
        team = self._teams[contender.who] = Team(contender, self._sizes, self._pace.timeout)
        info = dict(team.answers()[0].info)
        for _ in range(WARM_UP):
            turn = team.ask(str(self._pace.steps))
        self._largest = max(self._largest, sum(part.rss for part in turn))
        team.ask("forget")
        self.measured[contender.who] = Measured(contender, self._pace, info=info)

    def _round(self, number: int) -> None:
        """A turn of everyone; another one begins each time."""
        order = list(self.measured)
        first = number % max(1, len(order))
        for who in order[first:] + order[:first]:
            self._guard(
                who, lambda who=who: self.measured[who].turns.append(self._teams[who].ask(str(self._pace.steps)))
            )
        times = "  ".join(f"{who} {measured.ms()[-1]:.0f}" for who, measured in self.measured.items())
        self._say(f"round {number + 1} of {self._pace.rounds}, ms a step: {times}")

    def _guard(self, who: str, act: Callable[[], Any]) -> None:
        """Do something with a contender, who is out if that fails."""
        try:
            act()
        except Out as error:
            self.out[who] = str(error)
            self._say(f"{who} is out: {error}\n{error.text}".rstrip())
            self.measured.pop(who, None)
            if who in self._teams:
                self._teams.pop(who).close()


def _available() -> int | None:
    """Bytes of memory that could still be used, where the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
