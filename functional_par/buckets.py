"""Which gradients are summed together, and over which ranks: pure data, of which every rank of a bucket makes the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import NamedTuple

from functional_par.bucket import Bucket, Rest, Slice, aligned
from functional_par.plan import Plan
from functional_par.spec import Spec, payers

ELEMENT = 4
"""Bytes of a gradient by which the size of a bucket is reckoned: float32 (float64 runs have twice as many)."""


def buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """The buckets of one rank; those of one set of ranks are in the same order on all of them.

    Leaves that owe the same ranks are cut at ``plan.bucket_mb``, in the order in which their gradients become ready: those of
    the last layers first. A leaf goes by the first layer of the whole model that reads it, on whatever stage that is, so
    the owners of a tied leaf cut alike.

    With ``plan.zero`` a leaf that owes data axes is cut in slices over them, and what else it owes is summed slice by slice.
    From ``zero=2`` on the leaves that the same layers read have a bucket of their own, of any size.
    """
    leaves = (path for path in plan.held(plan.mesh.coords(rank).pp) if plan.specs[path].trainable)
    return _packed(plan, rank, leaves)


def frozen_buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """The frozen leaves of a rank that are cut in slices, as those of ``zero=3`` are."""
    if plan.zero < 3:
        return ()
    leaves = (path for path in plan.held(plan.mesh.coords(rank).pp) if not plan.specs[path].trainable)
    return tuple(bucket for bucket in _packed(plan, rank, leaves) if bucket.sliced)


def slices(plan: Plan, rank: int) -> dict[str, Slice]:
    """What of each leaf that is cut in slices is a rank's."""
    found: dict[str, Slice] = {}
    for bucket in (*buckets(plan, rank), *frozen_buckets(plan, rank)):
        if bucket.sliced:
            found.update((path, piece) for path, piece, _ in bucket.slices(bucket.index(rank)))
    return found


def groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Every set of ranks that some bucket or some map of the user sums over, in one order for all ranks."""
    owed = {(axes, spec.owners) for spec in plan.specs.values() for axes in _sums(plan, spec) if axes}
    found = set()
    for axes, owners in owed | plan.map_groups:
        for group in plan.mesh.groups(*axes):
            found.add(tuple(rank for rank in group if plan.mesh.coords(rank).pp in owners))
    return tuple(sorted(group for group in found if len(group) > 1))


def _sums(plan: Plan, spec: Spec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of the first sum of a leaf's gradient, which are those it is cut over if it is; and of the second."""
    cut = cut_axes(plan, spec)
    owed = tuple(axis for axis in spec.pending if getattr(plan.mesh, axis) > 1)
    return (cut, tuple(axis for axis in owed if axis not in cut)) if cut else (owed, ())


def cut_axes(plan: Plan, spec: Spec) -> tuple[str, ...]:
    """The data axes over which a leaf is cut in slices: those along which it is a copy and its gradient a partial sum. A frozen
    one is cut by ``zero=3`` alone."""
    if not plan.zero or not (spec.trainable or plan.zero == 3):
        return ()
    copied = spec.pending if spec.trainable else [axis for axis in plan.data_axes if axis not in spec.axes]
    return tuple(axis for axis in plan.data_axes if axis in copied and getattr(plan.mesh, axis) > 1)


def contributions(plan: Plan, pp: int) -> dict[str, int]:
    """How often in a step the ranks at a pp coordinate add to each leaf's gradient: once a microbatch and layer."""
    found: dict[str, int] = {}
    for layer in plan.layers_on(pp):
        for path in layer.paths:
            if plan.specs[path].trainable:
                found[path] = found.get(path, 0) + plan.microbatches
    return found


class RestSum(NamedTuple):
    """One further sum of slices: over which ranks, and which stretches of this rank's part of each bucket it is of.

    Attributes:
        ranks: who pays together, in rank order.
        label: what the sum runs along.
        stretches: bucket, by its place, and first and last element within the rank's part.
    """

    ranks: tuple[int, ...]
    label: str
    stretches: tuple[tuple[int, int, int], ...]

    @property
    def elements(self) -> int:
        return sum(stop - start for _, start, stop in self.stretches)


def rest_sums(plan: Plan, rank: int, own: Sequence[Bucket]) -> tuple[RestSum, ...]:
    """How the slices of a rank's buckets are summed over what their leaves owe besides: one collective for each set of ranks,
    in one order for all of them."""
    owed: dict[tuple[tuple[int, ...], str], list[tuple[int, int, int]]] = {}
    for i, bucket in enumerate(own):
        low = bucket.index(rank) * bucket.part
        for rest in bucket.rest:
            start, stop = max(rest.start - low, 0), min(rest.stop - low, bucket.part)
            ranks = payers(plan.mesh, rank, rest.axes, rest.owners)
            if start < stop and len(ranks) > 1:
                owed.setdefault((ranks, "+".join(rest.axes)), []).append((i, start, stop))
    return tuple(RestSum(*key, tuple(owed[key])) for key in sorted(owed))


class _Kind(NamedTuple):
    """What the leaves of a bucket have in common."""

    ranks: tuple[int, ...]
    sliced: bool
    owners: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()


def _packed(plan: Plan, rank: int, leaves: Iterable[str]) -> tuple[Bucket, ...]:
    readers: dict[str, list[str]] = {}
    order = {layer.name: i for i, layer in enumerate(plan.model.all_layers)}
    for layer in plan.model.all_layers:
        for path in layer.paths:
            readers.setdefault(path, []).append(layer.name)
    grouped: dict[_Kind, list[str]] = {}
    for path in sorted(leaves, key=lambda path: (-order[readers[path][0]], path)):
        grouped.setdefault(_kind(plan, rank, path, readers[path]), []).append(path)
    pieces = [(kind, piece) for kind, found in grouped.items() for piece in _capped(plan, kind, found)]
    # Of the buckets of one set of ranks, the one first that has everything first.
    pieces.sort(key=lambda each: (each[0].ranks, -order[readers[each[1][-1]][0]], each[1][-1]))
    return tuple(_bucket(plan, kind, piece) for kind, piece in pieces)


def _kind(plan: Plan, rank: int, path: str, readers: Sequence[str]) -> _Kind:
    spec = plan.specs[path]
    if cut := cut_axes(plan, spec):
        return _Kind(plan.mesh.group(*cut, rank=rank), True, spec.owners, tuple(readers) if plan.zero > 1 else ())
    return _Kind(spec.payers(plan.mesh, rank), False)


def _capped(plan: Plan, kind: _Kind, paths: Sequence[str]) -> Iterator[list[str]]:
    """The leaves in order, cut before the one with which a bucket would become too large."""
    room, piece, size = inf if kind.readers else plan.bucket_mb * 2**20 / ELEMENT, list[str](), 0
    for path in paths:
        elements = aligned(prod(plan.specs[path].local_shape(plan.mesh)))
        if piece and size + elements > room:
            yield piece
            piece, size = [], 0
        piece.append(path)
        size += elements
    yield piece


def _bucket(plan: Plan, kind: _Kind, paths: Sequence[str]) -> Bucket:
    """The bucket of some leaves; if it is cut, those that owe the same further sum are next to each other."""
    sums = {path: _sums(plan, plan.specs[path]) for path in paths}
    if kind.sliced:
        paths = sorted(paths, key=lambda path: sums[path][1])  # stable: else as they become ready
    shapes = tuple(plan.specs[path].local_shape(plan.mesh) for path in paths)
    bucket = Bucket(kind.ranks, sums[paths[0]][0], tuple(paths), shapes, kind.sliced)
    return replace(bucket, rest=tuple(_rest(plan, bucket, sums))) if kind.sliced else bucket


def _rest(plan: Plan, bucket: Bucket, sums: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]) -> Iterator[Rest]:
    ends: dict[tuple[str, ...], Rest] = {}
    for path, shape, start in bucket.places():
        axes = sums[path][1]
        first = ends[axes].start if axes in ends else start
        ends[axes] = Rest(axes, plan.specs[path].owners, first, start + prod(shape))
    yield from (rest for axes, rest in ends.items() if axes)
