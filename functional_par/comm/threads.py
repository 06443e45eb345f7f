"""Ranks as threads of this process. They exchange references to tensors and each computes its own result.

A collective synchronises once: a rank waits until all inputs are there, never until the others have read them. Inputs
are values that nobody modifies, and no result aliases another rank's tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functional_par.comm import local
from functional_par.comm.base import AllReduce, Group, Handle, Op, World
from functional_par.comm.hub import Gate, Hub, named
from functional_par.comm.sets import standing_sets
from functional_par.comm.solo import Done, SoloGroup
from functional_par.errors import CommError, MismatchError
from functional_par.mesh import Mesh


class Switchboard:
    """What all ranks of one run share: the hub, the meetings and messages under way, and the prepared sets."""

    def __init__(self, mesh: Mesh, timeout: float = 1800.0) -> None:
        self.mesh = mesh
        self.hub = Hub(mesh.size, timeout)
        self.prepared: list[tuple[int, ...]] = []
        self._open: dict[Any, Any] = {}

    def join(self, key: Any, make: Callable[[], Any], visits: int) -> Any:
        """The object at ``key``, made by the first visitor and forgotten here after the last; under the lock."""
        thing = self._open.pop(key, None) or make()
        thing.visits += 1
        if thing.visits < visits:
            self._open[key] = thing
        return thing


class ThreadWorld(World):
    """One rank's view of a switchboard."""

    def __init__(self, board: Switchboard, rank: int, device: torch.device | str = "cpu") -> None:
        self.mesh, self.rank, self.device, self.backend = board.mesh, rank, torch.device(device), "threads"
        self.record = board.hub.records[rank]
        self._board = board
        self._sets = set(standing_sets(board.mesh))
        self._prepared = 0
        self._counts: dict[Any, int] = {}

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        for ranks in groups:
            with self._board.hub.lock:
                if self._prepared == len(self._board.prepared):
                    self._board.prepared.append(tuple(ranks))
                first = self._board.prepared[self._prepared]
            if first != tuple(ranks):
                raise MismatchError(
                    f"rank {self.rank} prepares group {tuple(ranks)} where another rank prepared {first}: every rank "
                    f"prepares the same sets in the same order."
                )
            self._prepared += 1
            self._sets.add(first)

    def subgroup(self, ranks: tuple[int, ...], label: str) -> Group:
        check_member(self, ranks, label, self._sets)
        return SoloGroup(self.rank, label) if len(ranks) == 1 else ThreadGroup(self, ranks, label)

    def send(self, x: Tensor, to: int, *, label: str = "pp") -> Handle:
        check_peer(self, to, "send to")
        self.record.add(label, "send", x)
        message = self._message(self.rank, to)
        message.offer(self.rank, x.detach())
        return Done(x)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, *, label: str = "pp") -> Handle:
        check_peer(self, source, "recv from")
        self.record.add(label, "recv", torch.empty(shape, dtype=dtype, device="meta"))
        message = self._message(source, self.rank)
        message.expect(tuple(shape), dtype)
        return _Pending(self, message, self.record.last)

    def _message(self, source: int, to: int) -> _Message:
        hub = self._board.hub
        hub.check(self.rank)
        key = "message", source, to, self.count((self.rank, source, to))
        with hub.lock:
            return self._board.join(key, lambda: _Message(hub, source, to), visits=2)

    def count(self, what: Any) -> int:
        """How often this was called with ``what`` before: the place in the rank's program."""
        number = self._counts[what] = self._counts.get(what, -1) + 1
        return number

    def meet(self, group: ThreadGroup, op: Op, x: Tensor, donate: bool) -> Handle:
        """Bring ``x`` to the meeting of the group that is next in this rank's program."""
        hub, ranks = self._board.hub, group.ranks
        hub.check(self.rank)
        key = ranks, self.count(ranks)
        with hub.lock:
            meeting = self._board.join(key, lambda: _Meeting(hub, ranks, op), visits=len(ranks))
        call = self.record.last
        meeting.bring(group.index, x.detach(), op, donate, call)
        return _Pending(self, meeting, call, group.index)


class ThreadGroup(Group):
    """A group of ranks that are threads of this process."""

    def __init__(self, world: ThreadWorld, ranks: tuple[int, ...], label: str) -> None:
        self.label, self.ranks, self.index = label, ranks, ranks.index(world.rank)
        self._world = world

    def start(self, op: Op, x: Tensor, *, donate: bool = False) -> Handle:
        self._world.record.add(self.label, kind(op), x)
        return self._world.meet(self, op, x, donate)


class _Pending:
    """A result that is not there yet."""

    def __init__(self, world: ThreadWorld, event: _Meeting | _Message, call: str, index: int = 0) -> None:
        self._world, self._event, self._call, self._index = world, event, call, index
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        if self._value is None:
            self._value = self._event.take(self._world.rank, self._index, lambda: self._call)
            del self._event
        return self._value


class _Meeting:
    """One collective: the ranks' inputs, and for an all-reduce the outputs that they fill together."""

    def __init__(self, hub: Hub, ranks: tuple[int, ...], op: Op) -> None:
        self.visits = 0
        self._hub, self._ranks, self._op = hub, ranks, op
        self._arrived, self._reduced = Gate(ranks), Gate()
        self._inputs: list[Any] = [None] * len(ranks)
        self._outputs: list[Any] = [None] * len(ranks)
        self._calls: list[str] = [""] * len(ranks)
        self._shared: local.SharedReduction | None = None

    def bring(self, index: int, x: Tensor, op: Op, donate: bool, call: str) -> None:
        large = x.numel() > local.CHUNK
        if large and isinstance(op, AllReduce):
            x = x.contiguous()
            self._outputs[index] = x if donate else torch.empty_like(x)
        self._inputs[index], self._calls[index] = x, call
        with self._hub.lock:
            self._check(index, x, op)
            self._arrived.missing.discard(self._ranks[index])
            last = not self._arrived.missing
        if last:
            if isinstance(op, AllReduce):
                self._prepare(op, large)
            self._hub.open(self._arrived)

    def _prepare(self, op: AllReduce, large: bool) -> None:
        if large:
            self._shared = local.SharedReduction(op, self._inputs, self._outputs)
        else:
            total = local.combine(op, self._inputs)
            self._outputs = [total, *(total.clone() for _ in self._ranks[1:])]

    def take(self, rank: int, index: int, what: Callable[[], str]) -> Tensor:
        self._hub.wait(rank, self._arrived, what)
        if self._shared is not None:
            if self._shared.work():
                self._hub.open(self._reduced)
            self._hub.wait(rank, self._reduced, what)
        if isinstance(self._op, AllReduce):
            return self._outputs[index]
        return local.outcome(self._op, self._inputs, index)

    def _check(self, index: int, x: Tensor, op: Op) -> None:
        for other, there in enumerate(self._inputs):
            if other != index and there is not None:
                if (op, x.dtype, x.shape) != (self._op, there.dtype, there.shape):
                    raise mismatch(self._ranks[other], self._calls[other], self._ranks[index], self._calls[index])
                return


class _Message:
    """One tensor on its way from a rank to another."""

    def __init__(self, hub: Hub, source: int, to: int) -> None:
        self.visits = 0
        self._hub, self._source, self._to = hub, source, to
        self._sent = Gate((source,))
        self._x: Tensor | None = None
        self._expected: tuple[tuple[int, ...], torch.dtype] | None = None

    def offer(self, rank: int, x: Tensor) -> None:
        with self._hub.lock:
            self._x = x
            self._sent.missing.discard(rank)
            self._check()
        self._hub.open(self._sent)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        with self._hub.lock:
            self._expected = shape, dtype
            self._check()

    def take(self, rank: int, index: int, what: Callable[[], str]) -> Tensor:
        self._hub.wait(rank, self._sent, what)
        assert self._x is not None
        return self._x.clone()

    def _check(self) -> None:
        if self._x is None or self._expected is None:
            return
        sent, expected = (tuple(self._x.shape), self._x.dtype), self._expected
        if sent != expected:
            raise MismatchError(
                f"rank {self._source} sent {_typed(*sent)} to rank {self._to}, which expects {_typed(*expected)}."
            )


def mismatch(first: int, first_call: str, second: int, second_call: str) -> MismatchError:
    """Two ranks entered different collectives at one place."""
    return MismatchError(
        f"rank {first} entered {first_call}, but rank {second} entered {second_call}. All ranks of a group call "
        f"the same collectives on the same shapes in the same order."
    )


def check_member(world: World, ranks: tuple[int, ...], label: str, sets: set[tuple[int, ...]]) -> None:
    """Raise CommError unless the rank is in the set and the set was prepared."""
    if world.rank not in ranks:
        raise CommError(f"rank {world.rank} asks for group {label!r} of {named(ranks)}, to which it does not belong.")
    if len(ranks) > 1 and ranks not in sets:
        raise CommError(f"group {label!r} of {named(ranks)} was not prepared: call world.prepare on every rank first.")


def check_peer(world: World, peer: int, what: str) -> None:
    """Raise CommError unless ``peer`` is another rank of the world."""
    if peer == world.rank or not 0 <= peer < world.mesh.size:
        raise CommError(f"rank {world.rank}: {what} rank {peer}, but its peers are the other ranks of {world.mesh}.")


def kind(op: Op) -> str:
    """The name of an operation in the record.

    >>> kind(AllReduce())
    'all_reduce'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(op).__name__).lower()


def _typed(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
