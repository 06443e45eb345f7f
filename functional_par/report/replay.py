"""The schedule that a measured timeline ran, and what its actions cost: what to simulate beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from functional_par.errors import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.schedule import Row, Schedule
from functional_par.pipeline.timeline import Timeline


@dataclass(frozen=True)
class Replay:
    """A run, as a schedule.

    Attributes:
        schedule: of one pipeline.
        costs: mean times of each stage, over all microbatches and over the pipelines that ran side by side.
        homes: of each rank of the timeline its rank in the schedule; None for one that did nothing.
    """

    schedule: Schedule
    costs: Costs
    homes: tuple[int | None, ...]


def replay(timeline: Timeline, name: str) -> Replay:
    """What a timeline ran. Ranks with the same stages are copies of each other, on other axes of the mesh.

    Raises:
        ScheduleError: if copies differ in what they did, or a stage is in two rows that are no copies.
    """
    rows = order(timeline)
    distinct: dict[tuple[int, ...], int] = {}
    homes: list[int | None] = []
    for rank, row in enumerate(rows):
        stages = tuple(sorted({action.stage for action in row}))
        first = distinct.setdefault(stages, rank) if row else rank
        if rows[first] != row:
            raise ScheduleError(
                f"rank {rank} and rank {first} ran the same stages, {', '.join(map(str, stages))}, in another order: this "
                "is no run of one schedule."
            )
        homes.append(list(distinct).index(stages) if row else None)
    schedule = Schedule(name, tuple(rows[rank] for rank in distinct.values()))
    schedule.placement  # noqa: B018  # raises for a stage in two rows
    return Replay(schedule, costs(timeline, schedule.stages), tuple(homes))


def order(timeline: Timeline) -> tuple[Row, ...]:
    """What each rank did, in order."""
    rows: list[list] = [[] for _ in range(timeline.ranks)]
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        rows[span.rank].append(span.action)
    return tuple(map(tuple, rows))


def costs(timeline: Timeline, stages: int) -> Costs:
    """Mean times of each stage. A backward that never ran in two parts is half of each."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in timeline.spans:
        found.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)

    def mean(stage: int, kind: str) -> float | None:
        times = found.get((stage, kind))
        return sum(times) / len(times) if times else None

    forward, inputs, weights = [], [], []
    for stage in range(stages):
        whole, i, w = mean(stage, "B") or 0.0, mean(stage, "I"), mean(stage, "W")
        forward.append(mean(stage, "F") or 0.0)
        inputs.append(i if i is not None else max(0.0, whole - w) if w is not None else whole / 2)
        weights.append(w if w is not None else max(0.0, whole - i) if i is not None else whole / 2)
    return Costs(tuple(forward), tuple(inputs), tuple(weights), 0.0)


def spread(replay: Replay, numbers: Sequence[int]) -> list[int]:
    """Numbers of the schedule's ranks for all ranks of the timeline."""
    return [0 if home is None else numbers[home] for home in replay.homes]
