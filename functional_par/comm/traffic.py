"""What communication costs on the wire: bytes that a rank sends in each collective, and sums of them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from functional_par.comm.base import AGREEMENT, AllGather, AllReduce, Op, Permute, Record
from functional_par.comm.checks import kind

Key = tuple[str, str, str]
"""Phase, label of the group, and kind: how a ``Record`` counts."""


def sent_bytes(op: Op, nbytes: int, ranks: int, index: int = 0) -> int:
    """Bytes that one rank of a group sends at least, for a local input of so many bytes; rounded down.

    An all-reduce is a reduce-scatter of the input and an all-gather of a part of it (Rabenseifner 2004; Chan et al. 2007,
    "Collective communication: theory, practice, and experience").

    Args:
        op: the operation.
        nbytes: size of the local input.
        ranks: size of the group.
        index: the rank's place in it.

    >>> from functional_par.comm.base import AllToAll, ReduceScatter
    >>> [sent_bytes(op, 600, 3) for op in (AllReduce(), AllGather(0), ReduceScatter(0), AllToAll(0, 0))]
    [800, 1200, 400, 400]
    >>> [sent_bytes(Permute((1, 0, 2)), 600, 3, index) for index in range(3)]
    [600, 600, 0]
    """
    if isinstance(op, Permute):
        return nbytes if op.to[index] != index else 0
    if isinstance(op, AllGather):
        return (ranks - 1) * nbytes
    return (2 if isinstance(op, AllReduce) else 1) * (ranks - 1) * nbytes // ranks


class Flow(NamedTuple):
    """Calls of one kind in one phase along one label.

    Attributes:
        calls: their number.
        nbytes: sizes of the local inputs, or of what was received.
        sent: bytes that this rank put on the wire.
    """

    calls: int = 0
    nbytes: int = 0
    sent: int = 0


@dataclass(frozen=True)
class Traffic:
    """What one rank communicates, by phase, label and kind."""

    flows: Mapping[Key, Flow] = field(default_factory=dict)

    @property
    def sent(self) -> int:
        """Bytes that the rank puts on the wire."""
        return sum(flow.sent for flow in self.flows.values())


class Call(NamedTuple):
    """Some calls that are alike, on one rank.

    Attributes:
        phase, label, kind: how they are counted.
        nbytes: size of the input of each.
        sent: bytes that each puts on the wire.
        times: their number.
    """

    phase: str
    label: str
    kind: str
    nbytes: int
    sent: int
    times: int = 1

    @classmethod
    def of(
        cls, phase: str, label: str, op: Op, nbytes: int, ranks: int, *, index: int = 0, times: int = 1
    ) -> Iterator[Call]:
        """The calls of a collective; none in a group of one rank, or none times."""
        if ranks > 1 and times:
            yield cls(phase, label, kind(op), nbytes, sent_bytes(op, nbytes, ranks, index), times)


def total(calls: Iterable[Call]) -> Traffic:
    """All calls together."""
    flows: dict[Key, Flow] = {}
    for call in calls:
        key = call.phase, call.label, call.kind
        before = flows.get(key, Flow())
        flows[key] = Flow(
            before.calls + call.times,
            before.nbytes + call.times * call.nbytes,
            before.sent + call.times * call.sent,
        )
    return Traffic(flows)


def measured(record: Record) -> Traffic:
    """What a rank recorded, but for what ranks compare before they start."""
    flows = {
        key: Flow(calls, record.nbytes[key], record.sent[key])
        for key, calls in record.calls.items()
        if key[0] != AGREEMENT
    }
    return Traffic(flows)
