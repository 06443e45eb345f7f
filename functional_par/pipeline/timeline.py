"""When each rank did what: simulated or measured, the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike

from functional_par.pipeline.schedule import Action


@dataclass(frozen=True)
class Span:
    """One action of one rank, from ``start`` to ``end`` on the clock that all ranks share. Waiting is not part of it."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All spans of one run of a schedule.

    Attributes:
        ranks: number of ranks.
        spans: in the order of their starts on each rank.
        unit: of the times: "s", or "" for multiples of a unit of work.
    """

    ranks: int
    spans: tuple[Span, ...]
    unit: str = ""

    @property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return self.end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank worked."""
        totals = [0.0] * self.ranks
        for span in self.spans:
            totals[span.rank] += span.end - span.start
        return tuple(totals)

    @property
    def bubble(self) -> float:
        """Idle share of the makespan, mean over the ranks."""
        whole = self.makespan * self.ranks
        return 1.0 - sum(self.busy) / whole if whole else 0.0

    def draw(self, path: str | PathLike[str], title: str = "", labels: Sequence[str] = ()) -> None:
        """Draw to a file: .svg, .png or .pdf (with matplotlib), or .json for Perfetto.

        Args:
            path: of the file.
            title: above the picture; the bubble if left out.
            labels: names of the rows, ``rank 0`` and so on if left out.

        Raises:
            ConfigError: another ending, a file that cannot be written, or no matplotlib.
        """
        from functional_par.report.draw import draw  # what draws timelines is built on them
        from functional_par.report.picture import Panel

        draw(path, [Panel(self, title or f"bubble {self.bubble:.1%}", tuple(labels))])
