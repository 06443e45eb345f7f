"""What a schedule keeps in memory: the activations of a stage and a microbatch, from the start of its forward to the end of its
``B`` or ``W``; where there are only forwards, to the end of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from functional_par.errors import ScheduleError
from functional_par.pipeline.schedule import Schedule


def peaks(schedule: Schedule, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """The most that each rank keeps at a time: activations, or bytes if the size of each stage's is given."""
    return tuple(max(_kept(schedule, rank, sizes), default=0) for rank in range(schedule.ranks))


def check_bounds(schedule: Schedule, most: int | Sequence[int]) -> None:
    """Raises ScheduleError for a rank that keeps more activations than it may."""
    bounds = [most] * schedule.ranks if isinstance(most, int) else most
    if len(bounds) != schedule.ranks:
        raise ScheduleError(
            f"schedule {schedule.name}: most_live={list(bounds)} has {len(bounds)} bounds for {schedule.ranks} ranks. Give "
            "one number for all, or one for each."
        )
    for rank, bound in enumerate(bounds):
        for at, now in enumerate(_kept(schedule, rank, None)):
            if now > bound:
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {rank} keeps {now} activations at {schedule.rows[rank][at]} (action "
                    f"{at}, counted from 0), more than {bound}. Let backwards come earlier, or allow more."
                )


def _kept(schedule: Schedule, rank: int, sizes: Sequence[int] | None) -> Iterator[int]:
    """While each action of a rank runs."""
    last = "BW" if any(action.kind != "F" for row in schedule.rows for action in row) else "F"
    now = 0
    for action in schedule.rows[rank]:
        size = 1 if sizes is None else sizes[action.stage]
        now += size * (action.kind == "F")
        yield now
        now -= size * (action.kind in last)
