"""What schedules are called: here, in nanotron, and in torch and torchtitan; and which stages they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

from functional_par.errors import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.makers import (
    afab,
    dual_pipe_v,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    zb_1p,
    zb_2p,
    zb_h1,
    zbv,
)
from functional_par.pipeline.schedule import Schedule

__all__ = [
    "afab",
    "canonical",
    "chunks_of",
    "dual_pipe_v",
    "interleaved",
    "interleaved_zb",
    "looped_bfs",
    "make_schedule",
    "one_f_one_b",
    "schedule_names",
    "zb_1p",
    "zb_2p",
    "zb_h1",
    "zbv",
]

CHUNKS = 2
"""Stages a rank, if a schedule takes any number and none is given."""


class _Maker(NamedTuple):
    """``chunks``: how many stages a rank the schedule has; None for any number, then ``make`` takes it too. ``by_costs``: it
    is made for the costs of the stages, which ``make`` takes too."""

    make: Callable[..., Schedule]
    chunks: int | None
    aliases: tuple[str, ...]
    by_costs: bool = False


_MAKERS: Mapping[str, _Maker] = MappingProxyType(
    {
        "afab": _Maker(afab, 1, ("AllForwardAllBackwardPipelineEngine", "GPipe", "ScheduleGPipe")),
        "1f1b": _Maker(one_f_one_b, 1, ("OneForwardOneBackwardPipelineEngine", "Schedule1F1B")),
        "interleaved": _Maker(interleaved, None, ("Interleaved1F1B", "ScheduleInterleaved1F1B")),
        "looped-bfs": _Maker(looped_bfs, None, ("LoopedBFS", "ScheduleLoopedBFS")),
        "zb-h1": _Maker(zb_h1, 1, ()),
        "zb-1p": _Maker(zb_1p, 1, (), by_costs=True),
        "zb-2p": _Maker(zb_2p, 1, (), by_costs=True),
        "zbv": _Maker(zbv, 2, ("ZBVZeroBubble", "ScheduleZBVZeroBubble")),
        "interleaved-zb": _Maker(interleaved_zb, None, ("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble")),
        "dualpipev": _Maker(dual_pipe_v, 2, ("ScheduleDualPipeV",)),
    }
)

_CANONICAL: Mapping[str, str] = MappingProxyType(
    {alias.lower(): name for name, maker in _MAKERS.items() for alias in (name, *maker.aliases)}
)


def schedule_names() -> tuple[str, ...]:
    """The names that schedules have here."""
    return tuple(_MAKERS)


def canonical(name: str) -> str:
    """The name that a schedule has here. In any case, with ``-`` or ``_``; raises ScheduleError for an unknown one.

    >>> canonical("Interleaved1F1B"), canonical("ZB_H1")
    ('interleaved', 'zb-h1')
    """
    found = _CANONICAL.get(name.lower().replace("_", "-")) if isinstance(name, str) else None
    if found is None:
        others = ", ".join(alias for maker in _MAKERS.values() for alias in maker.aliases)
        raise ScheduleError(
            f"schedule {name!r} is unknown{_hint(name)} There are {', '.join(_MAKERS)}; these names of nanotron and torch are "
            f"known too: {others}. For one of your own give the path of a CSV file, or give fp.stage_pp a function of (ranks, "
            "microbatches)."
        )
    return found


def _hint(name: object) -> str:
    """The name that may have been meant."""
    bare = {re.sub("[^a-z0-9]", "", alias): known for alias, known in _CANONICAL.items()}
    near = get_close_matches(re.sub("[^a-z0-9]", "", str(name).lower()), bare, 1)
    return f": did you mean {bare[near[0]]!r}?" if near else "."


def chunks_of(name: str, chunks: int | None = None) -> int:
    """How many stages each rank has under a schedule: what is given where any number will do (2 if left out).

    >>> chunks_of("1f1b"), chunks_of("interleaved", 3), chunks_of("zbv")
    (1, 3, 2)
    """
    name = canonical(name)
    has = _MAKERS[name].chunks
    _check_count(name, "chunks", chunks if chunks is not None else has or CHUNKS)
    if has is not None and chunks not in (None, has):
        several = ", ".join(other for other, maker in _MAKERS.items() if maker.chunks is None)
        raise ScheduleError(
            f"schedule {name}: chunks={chunks}, but it has {has} stage{'s' if has > 1 else ''} on each rank. Leave chunks out, "
            f"or take one of {several}."
        )
    return chunks if chunks is not None else has or CHUNKS


def make_schedule(
    name: str, ranks: int, microbatches: int, chunks: int | None = None, costs: Costs | None = None
) -> Schedule:
    """The schedule of that name, its stages ``ranks * chunks_of(name, chunks)``. ``zb-1p`` and ``zb-2p`` are made for the costs
    of the stages, ones if left out; all others are what they are.

    Raises:
        ScheduleError: an unknown name, a number below 1, or chunks that the schedule does not have.

    >>> print(make_schedule("GPipe", 2, 1))
    0F0 0B0
    1F0 1B0
    """
    name = canonical(name)
    given = chunks_of(name, chunks)
    _check_count(name, "ranks", ranks)
    _check_count(name, "microbatches", microbatches)
    maker = _MAKERS[name]
    if maker.by_costs:
        return maker.make(ranks, microbatches, costs)
    return maker.make(ranks, microbatches, given) if maker.chunks is None else maker.make(ranks, microbatches)


def _check_count(name: str, what: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ScheduleError(f"schedule {name}: {what}={number!r}: it is an integer of at least 1.")
