"""Ranks as threads of this process. They exchange references to tensors and each takes its own result.

A rank waits until all inputs are there, never until the others have read them. Inputs are values that nobody
modifies, and no result aliases another rank's tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functional_par.comm.base import Group, Handle, Op, World
from functional_par.comm.checks import Awaited, check_member, check_peer, check_set, kind, standing_sets
from functional_par.comm.hub import Hub
from functional_par.comm.meeting import Meeting, Message
from functional_par.comm.solo import Done, SoloGroup
from functional_par.comm.traffic import sent_bytes
from functional_par.errors import MismatchError
from functional_par.mesh import Mesh


class Switchboard:
    """What the ranks of one run share: the hub, the meetings and messages under way, the sets that were prepared."""

    def __init__(self, mesh: Mesh, timeout: float = 1800.0) -> None:
        self.mesh = mesh
        self.hub = Hub(mesh.size, timeout)
        self._prepared: list[tuple[int, ...]] = []
        self._under_way: dict[Any, Any] = {}

    def join(self, key: Any, make: Callable[[], Any], visits: int) -> Any:
        """The meeting or message at ``key``, made by the first visitor and forgotten here after the last."""
        with self.hub.lock:
            there = self._under_way.get(key)
            if there is None:
                there = self._under_way[key] = make()
            there.visits += 1
            if there.visits == visits:
                del self._under_way[key]
        return there

    def prepare(self, rank: int, place: int, ranks: tuple[int, ...]) -> None:
        """Note that ``rank`` prepares ``ranks`` as its set number ``place``."""
        with self.hub.lock:
            if place == len(self._prepared):
                self._prepared.append(ranks)
            first = self._prepared[place]
        if first != ranks:
            raise MismatchError(
                f"rank {rank} prepares group {ranks} where another rank prepared {first}: every rank prepares the same "
                f"sets in the same order."
            )


class ThreadWorld(World):
    """One rank's view of a switchboard."""

    def __init__(self, board: Switchboard, rank: int, device: torch.device | str = "cpu") -> None:
        self.mesh, self.rank, self.device, self.backend = board.mesh, rank, torch.device(device), "threads"
        self.record = board.hub.records[rank]
        self._board, self._hub = board, board.hub
        self._sets = set(standing_sets(board.mesh))
        self._places: Counter[Any] = Counter()

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        for ranks in groups:
            self._board.prepare(self.rank, self._place("prepare"), check_set(ranks, self.mesh))
            self._sets.add(tuple(ranks))

    def subgroup(self, ranks: tuple[int, ...], label: str) -> Group:
        check_member(self, ranks, label, self._sets)
        return SoloGroup(self.rank, label) if len(ranks) == 1 else ThreadGroup(self, ranks, label)

    def send(self, x: Tensor, to: int, *, label: str = "pp") -> Handle:
        check_peer(self, to, "send to")
        self.record.add(label, "send", x, x.nbytes)
        self._message(self.rank, to).offer(x.detach())
        return Done(x)

    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        source: int,
        *,
        label: str = "pp",
        out: Tensor | None = None,
        what: object = "",
    ) -> Handle:
        check_peer(self, source, "recv from")
        self.record.add(label, "recv", torch.empty(shape, dtype=dtype, device="meta"), 0)
        message = self._message(source, self.rank)
        message.expect(tuple(shape), dtype, out)
        return _Pending(self.rank, message, Awaited("recv", label, shape, dtype, what))

    def _message(self, source: int, to: int) -> Message:
        self._hub.check(self.rank)
        key = source, to, self._place((source, to, "message"))
        return self._board.join(key, lambda: Message(self._hub, source, to), visits=2)

    def meet(self, group: ThreadGroup, op: Op, x: Tensor, donate: bool) -> Handle:
        """Bring ``x`` to the meeting of the group's ranks that is next in this rank's program."""
        self._hub.check(self.rank)
        ranks = group.ranks
        key = ranks, self._place(ranks)
        meeting = self._board.join(key, lambda: Meeting(self._hub, ranks), visits=len(ranks))
        call = self.record.last
        meeting.bring(group.index, x.detach(), op, donate, call)
        return _Pending(self.rank, meeting, call, group.index)

    def _place(self, what: Any) -> int:
        place = self._places[what]
        self._places[what] = place + 1
        return place


class ThreadGroup(Group):
    """A group of ranks that are threads of this process."""

    def __init__(self, world: ThreadWorld, ranks: tuple[int, ...], label: str) -> None:
        self.label, self.ranks, self.index = label, ranks, ranks.index(world.rank)
        self._world = world

    def start(self, op: Op, x: Tensor, *, donate: bool = False) -> Handle:
        self._world.record.add(self.label, kind(op), x, sent_bytes(op, x.nbytes, self.size, self.index))
        return self._world.meet(self, op, x, donate)


class _Pending:
    """A result that may not be there yet."""

    def __init__(self, rank: int, source: Meeting | Message, call: object, index: int = 0) -> None:
        self._rank, self._source, self._call, self._index = rank, source, call, index
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        if self._value is None:
            self._value = self._source.take(self._rank, self._index, self._call)
            del self._source
        return self._value
