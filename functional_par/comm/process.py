"""Ranks as processes, over torch.distributed: NCCL between GPUs, gloo between CPUs.

Every process creates the same process groups in the same order, and a set of ranks has one group whatever it is called
for. Nothing here waits for another rank except ``wait`` and the creation of groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_par.comm import wire
from functional_par.comm.base import Group, Handle, Op, Record, World
from functional_par.comm.checks import Awaited, check_member, check_peer, check_set, kind, named, standing_sets, typed
from functional_par.comm.outbox import Outbox
from functional_par.comm.solo import Done, SoloGroup
from functional_par.comm.standing import Standing
from functional_par.comm.traffic import sent_bytes
from functional_par.errors import CommError, MismatchError
from functional_par.mesh import Mesh


class ProcessWorld(World):
    """This process's view of the world; ``torch.distributed`` has to be initialised.

    Raises:
        MeshError: if the mesh does not have as many ranks as there are processes.
    """

    def __init__(self, mesh: Mesh, device: torch.device | str = "cpu", timeout: float = 1800.0) -> None:
        mesh.check_world(dist.get_world_size())
        self.mesh, self.rank, self.device = mesh, dist.get_rank(), torch.device(device)
        self.backend, self.record = dist.get_backend(), Record()
        self.waits: _Call | None = None
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(mesh.size)): dist.group.WORLD}
        self._lanes: dict[tuple[int, int], Any] = {}
        self._places: Counter[str] = Counter()
        self._outbox = Outbox(self.backend)
        self._create(standing_sets(mesh))
        self._open_lanes(lane for ring in mesh.groups("pp") for lane in _neighbours(ring))

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        sets = [check_set(ranks, self.mesh) for ranks in groups]
        self._create(sets)
        self._open_lanes(lane for ranks in sets if len(ranks) == 2 for lane in (ranks, ranks[::-1]))

    def connect(self, lanes: Iterable[tuple[int, int]]) -> None:
        self._open_lanes(lanes)

    def subgroup(self, ranks: tuple[int, ...], label: str) -> Group:
        check_member(self, ranks, label, self._groups)
        return SoloGroup(self.rank, label) if len(ranks) == 1 else ProcessGroup(self, ranks, label)

    def send(self, x: Tensor, to: int, *, label: str = "pp") -> Handle:
        check_peer(self, to, "send to")
        group, _, place = self._lane(self.rank, to)
        self.record.add(label, "send", x, x.nbytes)
        x = x.detach().contiguous()
        self._outbox.add(dist.isend(x, to, group, _tag(place)), x)
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
        group, key, place = self._lane(source, self.rank)
        x = torch.empty(shape, dtype=dtype, device=self.device) if out is None else out
        self.record.add(label, "recv", x, 0)
        unwritten = wire.mark_end(x)
        work = dist.irecv(x, source, group, _tag(place))

        def finish() -> Tensor:
            if unwritten():
                raise MismatchError(
                    f"rank {source} sent fewer bytes to rank {self.rank} than {typed(shape, dtype)} has, which it "
                    f"expects. Shapes are static: both ends derive them from the plan."
                )
            return x

        return _Running(
            self, [work], finish, _Call(Awaited("recv", label, x.shape, x.dtype, what), key, place, (source,))
        )

    def start(self, group: ProcessGroup, op: Op, x: Tensor, donate: bool) -> Handle:
        """Start ``op`` on one of this world's groups."""
        view = wire.Wire(self._groups[group.ranks], group.ranks, group.index, self.backend)
        place = self._place(group.key)
        works, finish = wire.start(view, op, x.detach(), donate, _tag(place) + 1)
        return _Running(
            self, works, finish, _Call(Awaited(op, group.label, x.shape, x.dtype), group.key, place, group.ranks)
        )

    def standing(self) -> Standing | None:
        """What this rank waits for, for the others to read; None while it computes."""
        call = self.waits
        return None if call is None else call.standing(self.record.last, dict(self._places))

    def finished(self) -> Standing:
        """What the others read once this rank has finished."""
        return Standing(self.record.last, started=dict(self._places))

    def close(self) -> None:
        """Let go of what was sent; called when every rank has finished."""
        self._outbox.close()

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

    def _lane(self, source: int, to: int) -> tuple[Any, str, int]:
        """The process group for messages from one rank to another, their key, and the place of the next."""
        group = dist.group.WORLD if self.backend != "nccl" else self._lanes.get((source, to))
        if group is None:
            raise CommError(
                f"rank {source} has no connection to rank {to}: pipeline neighbours have one; for others call "
                f"world.prepare([{tuple(sorted((source, to)))}]) on every rank first."
            )
        key = f"{source}>{to}"
        return group, key, self._place(key)

    def _place(self, key: str) -> int:
        place = self._places[key]
        self._places[key] = place + 1
        return place


class ProcessGroup(Group):
    """A group of ranks that are processes."""

    def __init__(self, world: ProcessWorld, ranks: tuple[int, ...], label: str) -> None:
        self.label, self.ranks, self.index = label, ranks, ranks.index(world.rank)
        self.key = ",".join(map(str, ranks))
        self._world = world

    def start(self, op: Op, x: Tensor, *, donate: bool = False) -> Handle:
        self._world.record.add(self.label, kind(op), x, sent_bytes(op, x.nbytes, self.size, self.index))
        return self._world.start(self, op, x, donate)


class _Call:
    """What a handle waits for, kept so that it costs nothing until somebody has to read it."""

    def __init__(self, awaited: Awaited, key: str, place: int, peers: tuple[int, ...]) -> None:
        self._awaited, self._key, self._place, self.peers = awaited, key, place, peers

    def __str__(self) -> str:
        return str(self._awaited)

    def standing(self, last: str, started: dict[str, int]) -> Standing:
        """For the other ranks to read."""
        what = f"{self._awaited.op} of {typed(self._awaited.shape, self._awaited.dtype)}"
        return Standing(last, str(self), what, self._key, self._place, self.peers, started)


class _Running:
    """A collective or a receive under way. On NCCL ``wait`` orders the current stream and does not block the host."""

    def __init__(self, world: ProcessWorld, works: list[Any], finish: Callable[[], Tensor], call: _Call) -> None:
        self._world, self._works, self._finish, self._call = world, works, finish, call
        self._value: Tensor | None = None

    def wait(self) -> Tensor:
        if self._value is None:
            self._world.waits = self._call
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                doing = f", during {self._world.record.doing}" if self._world.record.doing else ""
                raise CommError(
                    f"rank {self._world.rank}: {self._call} with {named(self._call.peers)} did not complete{doing}: {error}"
                ) from error
            # Left as it is by an error: the report of this rank says where it was.
            self._world.waits = None
            self._value = self._finish()
            self._works.clear()
            del self._finish
        return self._value


def _neighbours(ring: tuple[int, ...]) -> list[tuple[int, int]]:
    """Both directions between stages that follow each other; the last is followed by the first."""
    pairs = [(here, after) for here, after in zip(ring, ring[1:] + ring[:1], strict=True) if here != after]
    return list(dict.fromkeys(lane for here, after in pairs for lane in ((here, after), (after, here))))


def _tag(place: int) -> int:
    """Even, so that the permutations of a group can have the odd ones."""
    return 2 * (place % (1 << 29))
