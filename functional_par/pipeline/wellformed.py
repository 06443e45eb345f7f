"""Whether a schedule has every action exactly once, each on its stage's rank and after those that it needs there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from functional_par.errors import ScheduleError
from functional_par.pipeline.schedule import KINDS, Action, Kind, Schedule

Places = Mapping[Action, tuple[int, int]]
"""The rank of each action, and its index in the rank's row."""

_MISSING = "is missing"
_BEFORE: Mapping[str, Kind] = MappingProxyType({"B": "F", "I": "F", "W": "I"})


def check_wellformed(
    schedule: Schedule, ranks: int | None, stages: int | None, microbatches: int | None, training: bool
) -> None:
    """Raises ScheduleError, see ``verify``. What is None is what the schedule names."""
    _check_actions(schedule, ranks, stages, microbatches)
    places = _places(schedule)
    stages = schedule.stages if stages is None else stages
    microbatches = schedule.microbatches if microbatches is None else microbatches
    homes = schedule.placement
    wrong = [
        (stage, what)
        for stage in range(stages)
        for microbatch in range(microbatches)
        for what in _wrong(places, stage, microbatch, training)
    ]
    if wrong:
        stage, what = wrong[0]
        where = f"on rank {homes[stage]}" if stage < len(homes) else f"and no rank has an action of stage {stage}"
        more = sum(_MISSING in other for _, other in wrong[1:]) if _MISSING in what else 0
        raise ScheduleError(f"schedule {schedule.name}: {what} {where}{f', and {more} more' if more else ''}.")
    _check_order(schedule, places)


def _check_actions(schedule: Schedule, ranks: int | None, stages: int | None, microbatches: int | None) -> None:
    """There is a row for each rank, and in them nothing but actions, and some."""
    if ranks is not None and schedule.ranks != ranks:
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.ranks} rows, but there are {ranks} ranks. Give one row of actions for "
            "each rank; that of a rank without stages is empty."
        )
    for rank, at, action in _actions(schedule):
        if not _is_action(action, stages, microbatches):
            shown = action if isinstance(action, Action) else repr(action)
            raise ScheduleError(
                f"schedule {schedule.name}: action {at} of rank {rank} (counted from 0) is {shown}. Stages are integers from 0"
                f"{_to(stages)}, microbatches from 0{_to(microbatches)}, kinds are {', '.join(KINDS)}."
            )
    if not any(schedule.rows):
        raise ScheduleError(f"schedule {schedule.name} has no action on any of {schedule.ranks} ranks.")


def _actions(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Rank, index in its row, and action."""
    return ((rank, at, action) for rank, row in enumerate(schedule.rows) for at, action in enumerate(row))


def _is_action(action: object, stages: int | None, microbatches: int | None) -> bool:
    return (
        isinstance(action, Action)
        and isinstance(action.kind, str)
        and action.kind in KINDS
        and all(
            type(number) is int and number >= 0 and (most is None or number < most)
            for number, most in ((action.stage, stages), (action.microbatch, microbatches))
        )
    )


def _to(most: int | None) -> str:
    return "" if most is None else f" to {most - 1}"


def _places(schedule: Schedule) -> Places:
    """Where each action is; none is there twice."""
    places: dict[Action, tuple[int, int]] = {}
    for rank, at, action in _actions(schedule):
        if action in places:
            other, before = places[action]
            raise ScheduleError(
                f"schedule {schedule.name}: {action}, the {action.words}, is there twice: as action {before} of rank {other} "
                f"and as action {at} of rank {rank} (counted from 0)."
            )
        places[action] = rank, at
    return places


def _wrong(places: Places, stage: int, microbatch: int, training: bool) -> Iterator[str]:
    """What is missing of a microbatch on a stage, or too much."""
    forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in KINDS)
    there = [action for action in (whole, inputs, weights) if action in places]
    if forward not in places:
        yield f"{forward}, the {forward.words}, {_MISSING}"
    if not training:
        if there:
            yield f"there is {there[0]}, but this schedule is of forwards only, and it is"
        return
    if there in ([whole], [inputs, weights]):
        return
    if whole in there:
        yield f"there are both {' and '.join(map(str, there))} (B is I and W in one)"
    elif not there:
        yield f"{whole}, the {whole.words}, {_MISSING} (or {inputs} and {weights})"
    else:
        [missing] = {inputs, weights} - {*there}
        yield f"{missing}, the {missing.words}, {_MISSING} ({there[0]} is there)"


def _check_order(schedule: Schedule, places: Places) -> None:
    """On one rank: a forward before its backward, the gradients of inputs before those of weights."""
    for rank, at, action in _actions(schedule):
        if action.kind == "F":
            continue
        needed = action._replace(kind=_BEFORE[action.kind])
        if places[needed][1] > at:
            raise ScheduleError(
                f"schedule {schedule.name}: rank {rank} runs {action} (action {at}, counted from 0) before {needed} "
                f"(action {places[needed][1]}), which it needs."
            )
