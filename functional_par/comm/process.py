"""Ranks as processes, over torch.distributed: NCCL between GPUs, gloo between CPUs.

Every process creates the same process groups in the same order, and a set of ranks has one group whatever it is called
for. Nothing here waits for another rank except ``wait``, ``close`` and the creation of groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_par.comm import wire
from functional_par.comm.base import Group, Handle, Op, Record, World
from functional_par.comm.checks import check_member, check_peer, check_set, kind, named, standing_sets, typed
from functional_par.comm.outbox import Outbox
from functional_par.comm.solo import Done, SoloGroup
from functional_par.errors import CommError, MismatchError
from functional_par.mesh import Mesh

_TAGS = 1 << 29
_UNWRITTEN = 0xA5


class ProcessWorld(World):
    """This process's view of the world; ``torch.distributed`` has to be initialised.

    Raises:
        MeshError: if the mesh does not have as many ranks as there are processes.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu", timeout: float = 1800.0) -> None:
        mesh.check_world(dist.get_world_size())
        self.mesh, self.rank, self.device = mesh, dist.get_rank(), torch.device(device)
        self.backend, self.record = dist.get_backend(), Record()
        self.waits_for: tuple[str, tuple[int, ...]] | None = None
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(mesh.size)): dist.group.WORLD}
        self._lanes: dict[tuple[int, int], Any] = {}
        self._places: Counter[Any] = Counter()
        self._outbox = Outbox(self.backend)
        self._create(standing_sets(mesh))
        self._open_lanes(lane for ring in mesh.groups("pp") for lane in _neighbours(ring))

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        sets = [check_set(ranks, self.mesh) for ranks in groups]
        self._create(sets)
        self._open_lanes(lane for ranks in sets if len(ranks) == 2 for lane in (ranks, ranks[::-1]))

    def subgroup(self, ranks: tuple[int, ...], label: str) -> Group:
        check_member(self, ranks, label, self._groups)
        return SoloGroup(self.rank, label) if len(ranks) == 1 else ProcessGroup(self, ranks, label)

    def send(self, x: Tensor, to: int, *, label: str = "pp") -> Handle:
        check_peer(self, to, "send to")
        group, tag = self._lane(self.rank, to)
        self.record.add(label, "send", x)
        x = x.detach().contiguous()
        self._outbox.add(dist.isend(x, to, group, tag), x)
        return Done(x)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, *, label: str = "pp") -> Handle:
        check_peer(self, source, "recv from")
        group, tag = self._lane(source, self.rank)
        x = torch.empty(shape, dtype=dtype, device=self.device)
        self.record.add(label, "recv", x)
        unwritten = _mark_end(x)
        work = dist.irecv(x, source, group, tag)

        def finish() -> Tensor:
            if unwritten():
                raise MismatchError(
                    f"rank {source} sent fewer bytes to rank {self.rank} than {typed(shape, dtype)} has, which it "
                    f"expects. Shapes are static: both ends derive them from the plan."
                )
            return x

        return _Running(self, [work], finish, (source,))

    def start(self, group: ProcessGroup, op: Op, x: Tensor, donate: bool) -> Handle:
        """Start ``op`` on one of this world's groups."""
        view = wire.Wire(self._groups[group.ranks], group.ranks, group.index, self.backend)
        tag = 2 * self._place(group.ranks) + 1
        return _Running(self, *wire.start(view, op, x.detach(), donate, tag), group.ranks)

    def close(self) -> None:
        """Return when everything that this rank sent has arrived."""
        self._outbox.drain()

    def _create(self, sets: Iterable[tuple[int, ...]]) -> None:
        for ranks in sets:
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def _open_lanes(self, lanes: Iterable[tuple[int, int]]) -> None:
        """On NCCL give each direction between two ranks a group: in one group, sends in both directions can block each
        other. Its connection is made here, in one order on all ranks, since making it blocks until both ends do."""
        if self.backend != "nccl":
            return
        for lane in lanes:
            if lane not in self._lanes:
                group = self._lanes[lane] = dist.new_group(sorted(lane), timeout=self._timeout)
                if self.rank in lane:
                    probe, (source, to) = torch.zeros(1, device=self.device), lane
                    dist.send(probe, to, group) if self.rank == source else dist.recv(probe, source, group)
                    torch.cuda.synchronize(self.device)

    def _lane(self, source: int, to: int) -> tuple[Any, int]:
        tag = 2 * self._place((source, to, "message"))
        if self.backend != "nccl":
            return dist.group.WORLD, tag
        if (source, to) not in self._lanes:
            raise CommError(
                f"rank {source} has no connection to rank {to}: pipeline neighbours have one; for others call "
                f"world.prepare([{tuple(sorted((source, to)))}]) on every rank first."
            )
        return self._lanes[source, to], tag

    def _place(self, what: Any) -> int:
        place = self._places[what]
        self._places[what] = place + 1
        return place % _TAGS


class ProcessGroup(Group):
    """A group of ranks that are processes."""

    def __init__(self, world: ProcessWorld, ranks: tuple[int, ...], label: str) -> None:
        self.label, self.ranks, self.index = label, ranks, ranks.index(world.rank)
        self._world = world

    def start(self, op: Op, x: Tensor, *, donate: bool = False) -> Handle:
        self._world.record.add(self.label, kind(op), x)
        return self._world.start(self, op, x, donate)


class _Running:
    """A collective or a receive under way. On NCCL ``wait`` orders the current stream and does not block the host."""

    def __init__(
        self, world: ProcessWorld, works: list[Any], finish: Callable[[], Tensor], ranks: tuple[int, ...]
    ) -> None:
        self._world, self._works, self._finish, self._ranks = world, works, finish, ranks
        self._call = world.record.last
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        if self._value is None:
            self._world.waits_for = self._call, self._ranks
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise CommError(
                    f"rank {self._world.rank}: {self._call} with {named(self._ranks)} did not complete: {error}"
                ) from error
            finally:
                self._world.waits_for = None
            self._value = self._finish()
            self._works.clear()
            del self._finish
        return self._value


def _neighbours(ring: tuple[int, ...]) -> list[tuple[int, int]]:
    """Both directions between stages that follow each other; the last is followed by the first."""
    pairs = [(here, after) for here, after in zip(ring, ring[1:] + ring[:1], strict=True) if here != after]
    return list(dict.fromkeys(lane for here, after in pairs for lane in ((here, after), (after, here))))


def _mark_end(x: Tensor) -> Callable[[], bool]:
    """Fill the last bytes of ``x`` with a pattern; the returned function tells whether they are still there.

    gloo takes a message that is too short for its buffer without a word. (It aborts the process for one too long.)
    """
    if x.device.type != "cpu" or x.nbytes < 8:
        return lambda: False
    tail = x.view(-1)[-math.ceil(8 / x.itemsize) :].view(torch.uint8)
    tail.fill_(_UNWRITTEN)
    return lambda: bool((tail == _UNWRITTEN).all())
