"""Between whole trees and shards: cutting, joining, and gathering over a world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_par import tree
from functional_par.bucket import Slice
from functional_par.buckets import slices
from functional_par.comm.base import AllReduce, World
from functional_par.errors import StateError
from functional_par.mesh import AXES, Coords, Mesh
from functional_par.plan import Plan
from functional_par.spec import Spec


def shard(params: Mapping[str, Any], plan: Plan, rank: int) -> dict[str, Any]:
    """The shards of one rank of a whole nested dict of parameters; uneven shards are padded with zeros. With ``zero=3`` these
    are the rank's slices [elements] of its shards.

    Raises:
        StateError: for a leaf that is missing or has another shape than its spec.
    """
    flat, coords, own = tree.flatten(params), plan.mesh.coords(rank), parameter_slices(plan, rank)
    found = {path: cut(plan, plan.specs[path], _whole(flat, plan.specs[path]), rank) for path in plan.held(coords.pp)}
    return tree.unflatten({path: own[path].of(x).clone() if path in own else x for path, x in found.items()})


def parameter_slices(plan: Plan, rank: int) -> dict[str, Slice]:
    """What of each leaf that a rank does not hold as a whole shard it holds."""
    return slices(plan, rank) if plan.zero == 3 else {}


def unshard(shards: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
    """The whole tree from the shards of all ranks, in rank order: the inverse of ``shard``. Tied names appear again."""
    if len(shards) != plan.mesh.size:
        raise StateError(f"unshard: {len(shards)} shards for {plan.mesh}, which has {plan.mesh.size} ranks.")
    flats = [tree.flatten(part) for part in shards]
    own = [parameter_slices(plan, rank) for rank in range(plan.mesh.size)]
    whole = {
        path: _join(plan, spec, [flat.get(path) for flat in flats], [each.get(path) for each in own])
        for path, spec in plan.specs.items()
    }
    return tree.unflatten(plan.named(whole))


def cut(plan: Plan, spec: Spec, whole: Tensor, rank: int) -> Tensor:
    """One rank's shard of one leaf, in memory of its own."""
    out = whole.new_zeros(spec.local_shape(plan.mesh))
    there, here = _windows(plan, spec, rank)
    out[here] = whole[there]
    return out


def place(plan: Plan, spec: Spec, whole: Tensor, part: Tensor, rank: int, piece: Slice | None = None) -> None:
    """Write one rank's shard, or its slice of that, into the whole leaf, leaving out its padding."""
    if piece is not None:
        own, part = part, cut(plan, spec, whole, rank)
        piece.of(part).copy_(own)
    there, here = _windows(plan, spec, rank)
    whole[there] = part[here]


def _windows(plan: Plan, spec: Spec, rank: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where one rank's shard lies in the whole leaf, and the same elements within the shard, its padding left out."""
    coords = plan.mesh.coords(rank)
    starts, kept = spec.starts(plan.mesh, coords), _kept(spec, plan.mesh, coords)
    there = tuple(slice(start, start + size) for start, size in zip(starts, kept, strict=True))
    return there, tuple(slice(0, size) for size in kept)


def _kept(spec: Spec, mesh: Mesh, coords: Coords) -> tuple[int, ...]:
    """For each dim how many entries of the leaf itself a shard holds; what follows them is padding."""
    ends = zip(spec.starts(mesh, coords), spec.local_shape(mesh), spec.shape, strict=True)
    return tuple(max(0, min(size, full - start)) for start, size, full in ends)


def has_padding(spec: Spec, mesh: Mesh, coords: Coords) -> bool:
    """Whether a shard holds more than its part of the leaf."""
    return _kept(spec, mesh, coords) != spec.local_shape(mesh)


def zero_padding(spec: Spec, mesh: Mesh, coords: Coords, part: Tensor) -> None:
    """Zero what a shard holds beyond the end of the leaf, in place."""
    for dim, kept in enumerate(_kept(spec, mesh, coords)):
        if (beyond := part.shape[dim] - kept) > 0:
            part.narrow(dim, kept, beyond).zero_()


def without_padding(spec: Spec, mesh: Mesh, coords: Coords, part: Tensor) -> Tensor:
    """A view of what a shard holds of the leaf itself."""
    for dim, kept in enumerate(_kept(spec, mesh, coords)):
        part = part.narrow(dim, 0, kept)
    return part


def gather_leaf(
    plan: Plan, world: World, path: str, part: Tensor | None, dtype: torch.dtype, piece: Slice | None = None
) -> Tensor:
    """One leaf whole on every rank: a sum over the world in which each shard, or each slice, is written by one rank.
    Collective."""
    spec = plan.specs[path]
    whole = torch.zeros(spec.shape, dtype=dtype, device=world.device)
    if part is not None and spec.counted_by(world.coords, piece.axes if piece else ()):
        place(plan, spec, whole, part, world.rank, piece)
    return world.group(*AXES).start(AllReduce(), whole, donate=True).wait()


def _join(plan: Plan, spec: Spec, parts: Sequence[Tensor | None], own: Sequence[Slice | None]) -> Tensor:
    whole: Tensor | None = None
    for rank, (part, piece) in enumerate(zip(parts, own, strict=True)):
        if part is None or not spec.counted_by(plan.mesh.coords(rank), piece.axes if piece else ()):
            continue
        if whole is None:
            whole = part.new_zeros(spec.shape)
        place(plan, spec, whole, part, rank, piece)
    if whole is None:
        raise StateError(f"unshard: no shard holds {spec.path}, which belongs to pipeline rank {spec.owners[0]}.")
    return whole


def _whole(flat: Mapping[str, Tensor], spec: Spec) -> Tensor:
    if spec.path not in flat:
        raise StateError(f"shard: the tree has no leaf {spec.path}.")
    if tuple(flat[spec.path].shape) != spec.shape:
        raise StateError(
            f"shard: {spec.path} has shape {tuple(flat[spec.path].shape)}, but its spec is {spec} {spec.shape}."
        )
    return flat[spec.path]
