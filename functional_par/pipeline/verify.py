"""Proves a schedule before it runs: complete, in order, free of deadlock, and within its memory. Nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from functional_par.errors import ScheduleError
from functional_par.pipeline.live import check_bounds, peaks
from functional_par.pipeline.messages import Task, tasks
from functional_par.pipeline.schedule import Edges, Schedule, chain
from functional_par.pipeline.token_game import Lane, play
from functional_par.pipeline.wellformed import check_wellformed


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that runs.

    Attributes:
        schedule: which.
        live: the most activations that each rank keeps at a time, counted in pairs of stage and microbatch: from the start
            of the forward to the end of the ``B`` or ``W``, or of the forward itself if there is no backward.
        messages: of each lane (source, target) between two ranks, how many.
        order: all tasks with their ranks, in an order in which each has what it takes.
    """

    schedule: Schedule
    live: tuple[int, ...]
    messages: Mapping[Lane, int]
    order: tuple[tuple[int, Task], ...] = field(repr=False)


def verify(
    schedule: Schedule,
    edges: Edges | None = None,
    ranks: int | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    most_live: int | Sequence[int] | None = None,
    training: bool = True,
) -> Proof:
    """Prove any schedule, in time linear in its actions.

    Args:
        schedule: made here or by a user.
        edges: which stages feed which; a chain if left out.
        ranks, stages, microbatches: how many it has to have; what it names if left out.
        most_live: bound on the activations that a rank keeps, or one for each rank.
        training: whether every forward has its backward; else there are forwards only.

    Raises:
        ScheduleError: an action is missing, repeated, on another rank than its stage's, or before one that it needs; ranks
            wait for each other; the ends of a lane disagree; too many activations are alive.

    >>> verify(Schedule.of("mine", [["0F0", "0B0"], ["1F0", "1B0"]])).messages
    {(0, 1): 1, (1, 0): 1}
    >>> verify(Schedule.of("mine", [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]))
    Traceback (most recent call last):
    functional_par.errors.ScheduleError: schedule mine never ends: rank 0 at 0B0 waits for gradients of microbatch 0 from stage 1, which rank 1 sends after 1B0; rank 1 at 1F1 waits for activations of microbatch 1 from stage 0, which rank 0 sends after 0F1.
    """  # noqa: E501
    check_wellformed(schedule, ranks, stages, microbatches, training)
    if most_live is not None:
        check_bounds(schedule, most_live)
    edges = chain(schedule.stages) if edges is None else _checked(schedule, edges)
    order = tuple(play(schedule.name, tasks(schedule, edges)))
    sent = Counter((m.source, m.target) for _, task in order for m in task.sends if not m.local)
    return Proof(schedule, peaks(schedule), dict(sorted(sent.items())), order)


def _checked(schedule: Schedule, edges: Edges) -> Edges:
    for at, (producer, consumer) in enumerate(edges):
        if not 0 <= producer < consumer < schedule.stages or (producer, consumer) in edges[:at]:
            raise ScheduleError(
                f"schedule {schedule.name}: edge {at} from stage {producer} to stage {consumer}: each edge goes, once, from a "
                f"stage to a later one of the stages 0 to {schedule.stages - 1}."
            )
    return edges
