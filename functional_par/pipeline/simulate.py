"""When each action of a schedule runs, for given costs: the timeline, its bubble, and what is kept in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functional_par.errors import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.live import peaks
from functional_par.pipeline.messages import Message
from functional_par.pipeline.schedule import Edges, Schedule
from functional_par.pipeline.timeline import Span, Timeline
from functional_par.pipeline.verify import Proof, verify

__all__ = ["Costs", "Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """What a schedule does for given costs.

    Attributes:
        timeline: every action from its start to its end.
        live: the most activations that each rank keeps, in pairs of stage and microbatch; see ``Proof``.
        live_bytes: the most bytes that each rank keeps; None if no bytes were given.
    """

    timeline: Timeline
    live: tuple[int, ...]
    live_bytes: tuple[int, ...] | None

    @property
    def bubble(self) -> float:
        """Idle share of the makespan, mean over the ranks."""
        return self.timeline.bubble

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    edges: Edges | None = None,
    activation_bytes: int | Sequence[int] | None = None,
) -> Simulation:
    """Run a schedule on a clock. An action starts when its rank is free and all it takes has arrived; sends never wait.

    Args:
        schedule: for training, or with forwards only.
        costs: times of actions and messages; ones, and no time for messages, if left out. Exact if they are exact.
        edges: which stages feed which; a chain if left out.
        activation_bytes: what a stage keeps for one microbatch: one number, or one for each stage.

    Raises:
        ScheduleError: a schedule that does not run, see ``verify``; costs or bytes of another number of stages.

    >>> from functional_par.pipeline.schedules import make_schedule
    >>> found = simulate(make_schedule("1f1b", 4, 8))
    >>> found.makespan, round(found.bubble, 4), found.live  # the bubble is 3 / (8 + 3)
    (33.0, 0.2727, (4, 3, 2, 1))
    """
    proof = verify(schedule, edges, training=any(getattr(a, "kind", "") != "F" for row in schedule.rows for a in row))
    costs = (costs or Costs()).check(schedule.stages)
    return Simulation(_timeline(proof, costs), proof.live, _live_bytes(schedule, activation_bytes))


def _timeline(proof: Proof, costs: Costs) -> Timeline:
    free: list[Any] = [0] * proof.schedule.ranks
    spans: list[list[Span]] = [[] for _ in free]
    arrived: dict[Message, Any] = {}
    for rank, task in proof.order:
        start = max([free[rank], *(arrived.pop(message) for message in task.takes)])
        free[rank] = start + costs.of(task.action)
        spans[rank].append(Span(rank, task.action, start, free[rank]))
        for message in task.sends:
            arrived[message] = free[rank] + (0 if message.local else costs.transfer)
    return Timeline(len(free), tuple(span for row in spans for span in row))


def _live_bytes(schedule: Schedule, given: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    sizes = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * schedule.stages
    if wrong := [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 0]:
        raise ScheduleError(
            f"schedule {schedule.name}: activation_bytes has {wrong[0]!r}, which is no number of bytes. Give integers of "
            "at least 0."
        )
    if len(sizes) != schedule.stages:
        raise ScheduleError(
            f"schedule {schedule.name}: activation_bytes={sizes} has {len(sizes)} numbers for {schedule.stages} stages. Give "
            "one number for all stages, or one for each."
        )
    return peaks(schedule, sizes)
