"""Where each process stands, in words that the others can read, and whether they can ever go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from functional_par.comm.checks import named


@dataclass(frozen=True)
class Standing:
    """A rank that waits, or one that has finished.

    Attributes:
        last: its last call.
        call: what it waits in; empty if it has finished.
        what: the same in a form that is equal on all ranks that entered the same.
        key: the set of ranks, or the direction of a message, that it waits for, and ``place`` counts calls on it.
        peers: the ranks that have to start what it waits for.
        started: how many calls it has started on each key.
    """

    last: str
    call: str = ""
    what: str = ""
    key: str = ""
    place: int = 0
    peers: tuple[int, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return not self.call

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Standing:
        fields = json.loads(text)
        return cls(**{**fields, "peers": tuple(fields["peers"])})


def trouble(standings: Mapping[int, Standing], size: int) -> str | None:
    """Why some rank can never go on, with one line a rank, or None. Ranks without a standing are computing.

    >>> print(trouble({0: Standing("sum", "sum", "sum", "0,1", 0, (0, 1), {"0,1": 1}), 1: Standing("send")}, 2))
    DeadlockError: ranks wait for each other and cannot go on.
      rank 0: waits for rank 1 in sum; last call: sum
      rank 1: has finished; last call: send
    """
    missing = {rank: _missing(rank, standings) for rank in standings}
    waiting = {rank: standing for rank, standing in standings.items() if not standing.finished}
    places: dict[tuple[str, int], set[str]] = {}
    for standing in waiting.values():
        places.setdefault((standing.key, standing.place), set()).add(standing.what)
    if any(len(entered) > 1 for entered in places.values()):
        why = "MismatchError: ranks of one group entered different collectives at the same place."
    elif any(standings[peer].finished for rank in waiting for peer in missing[rank]) or (
        waiting and len(standings) == size and all(missing[rank] for rank in waiting)
    ):
        why = "DeadlockError: ranks wait for each other and cannot go on."
    else:
        return None
    return "\n".join([why, *(f"  rank {rank}: {_line(rank, standings, missing)}" for rank in range(size))])


def _missing(rank: int, standings: Mapping[int, Standing]) -> list[int]:
    here = standings[rank]
    return [peer for peer in here.peers if peer in standings and standings[peer].started.get(here.key, 0) <= here.place]


def _line(rank: int, standings: Mapping[int, Standing], missing: Mapping[int, list[int]]) -> str:
    if rank not in standings:
        return "is computing"
    here = standings[rank]
    others = [peer for peer in here.peers if peer != rank]
    doing = "has finished" if here.finished else f"waits for {named(missing[rank] or others)} in {here.call}"
    return f"{doing}; last call: {here.last}"
