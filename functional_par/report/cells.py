"""What every picture of a timeline shows: how a span, a rank and the kinds are called, and which chunk a stage is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from functional_par.pipeline.schedule import KINDS, Action, Kind
from functional_par.pipeline.timeline import Timeline


def chunks(timeline: Timeline) -> Mapping[tuple[int, int], int]:
    """Of each (rank, stage) which of the rank's stages it is, from 0."""
    pairs = sorted({(span.rank, span.action.stage) for span in timeline.spans})
    first: dict[int, int] = {}
    return {(rank, stage): at - first.setdefault(rank, at) for at, (rank, stage) in enumerate(pairs)}


def most_chunks(timeline: Timeline) -> int:
    """The largest number of stages on one rank."""
    return 1 + max(chunks(timeline).values(), default=0)


def kinds(timeline: Timeline) -> tuple[Kind, ...]:
    """The kinds of action that occur, in the order F, B, I, W."""
    found = {span.action.kind for span in timeline.spans}
    return tuple(kind for kind in KINDS if kind in found)


def name(action: Action, chunk: int, most: int) -> str:
    """An action in few characters: kind and microbatch, in small letters on a second stage; with the stage if there are more.

    >>> name(Action(5, "F", 3), 0, 1), name(Action(5, "F", 3), 1, 2), name(Action(5, "F", 3), 2, 3)
    ('F3', 'f3', '5F3')
    """
    if most > 2:
        return str(action)
    text = f"{action.kind}{action.microbatch}"
    return text.lower() if chunk else text


def short(timeline: Timeline, share: int | None = None) -> float:
    """What a picture is scaled by: a duration than which a tenth of the spans are shorter (1 / ``share``), or half of those
    that were measured, among which there is noise; 1 if nothing takes time."""
    found = sorted(d for span in timeline.spans if (d := span.end - span.start) > 0)
    return found[(len(found) - 1) // (share or (2 if timeline.unit else 10))] if found else 1.0


def row_names(timeline: Timeline, labels: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the rows: those given, ``rank 3`` for what is left."""
    return tuple(labels[rank] if rank < len(labels) else f"rank {rank}" for rank in range(timeline.ranks))
