"""Names and checks that every backend shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from functional_par.comm.base import AllGather, AllReduce, AllToAll, Op, Permute, ReduceScatter, World
from functional_par.errors import CommError
from functional_par.mesh import AXES, DATA_AXES, Mesh

_KINDS: Mapping[type[Op], str] = {
    AllReduce: "all_reduce",
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllToAll: "all_to_all",
    Permute: "permute",
}


def standing_sets(mesh: Mesh) -> dict[tuple[int, ...], None]:
    """Sets of two or more ranks that every world has from the start, once each and in one order: along each axis,
    along the merged data axes, and all ranks.

    >>> list(standing_sets(Mesh(dp=2, tp=2)))
    [(0, 2), (1, 3), (0, 1), (2, 3), (0, 1, 2, 3)]
    """
    merged = [(axis,) for axis in AXES] + [DATA_AXES, AXES]
    return dict.fromkeys(ranks for axes in merged for ranks in mesh.groups(*axes) if len(ranks) > 1)


def check_set(ranks: Iterable[int], mesh: Mesh) -> tuple[int, ...]:
    """The set as a tuple; raises CommError unless it holds ranks of the mesh in increasing order."""
    ranks = tuple(ranks)
    if not ranks or list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= mesh.size:
        raise CommError(f"group {ranks}: it holds ranks 0 to {mesh.size - 1} in increasing order, each once.")
    return ranks


def check_member(world: World, ranks: tuple[int, ...], label: str, sets: Collection[tuple[int, ...]]) -> None:
    """Raise CommError unless the rank is in the set and the set was prepared."""
    if world.rank not in ranks:
        raise CommError(f"rank {world.rank} asks for group {label!r} of {named(ranks)}, to which it does not belong.")
    if len(ranks) > 1 and ranks not in sets:
        raise CommError(f"group {label!r} of {named(ranks)} was not prepared: call world.prepare on every rank first.")


def check_peer(world: World, peer: int, what: str) -> None:
    """Raise CommError unless ``peer`` is another rank of the world."""
    if peer == world.rank or not 0 <= peer < world.mesh.size:
        raise CommError(f"rank {world.rank}: {what} rank {peer}, but its peers are the other ranks of {world.mesh}.")


@dataclass(frozen=True)
class Awaited:
    """What a rank waits for: costs nothing until somebody has to read it."""

    op: Op | Literal["recv"]
    label: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    what: object = ""

    def __str__(self) -> str:
        """``recv over pp of float32[2, 3] (activations of microbatch 0 from stage 0 to stage 1)``."""
        name = self.op if isinstance(self.op, str) else kind(self.op)
        return f"{name} over {self.label} of {typed(self.shape, self.dtype)}" + (f" ({self.what})" if self.what else "")


def kind(op: Op) -> str:
    """The name of an operation in the record.

    >>> kind(AllReduce())
    'all_reduce'
    """
    return _KINDS[type(op)]


def named(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 1, 2``."""
    found = sorted(ranks)
    return ("rank " if len(found) == 1 else "ranks ") + ", ".join(map(str, found))


def typed(shape: Iterable[int], dtype: torch.dtype) -> str:
    """``float32[2, 3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
