"""Which gradients are summed together, and over which ranks: pure data, of which every rank of a bucket makes the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from functional_par.plan import Plan

ALIGNMENT = 16
"""Elements to which a leaf's place in a bucket is rounded, so that its bits do not depend on its neighbours."""

ELEMENT = 4
"""Bytes of a gradient by which the size of a bucket is reckoned: float32 (float64 runs have twice as many)."""


@dataclass(frozen=True)
class Bucket:
    """Leaves whose gradients share one flat buffer and are summed over the same ranks in one collective.

    Attributes:
        ranks: who pays together, in rank order; a single rank when nothing is owed.
        axes: what the sum runs along, for people.
        paths: the leaves in the order of their places, the same on every rank of the bucket.
        shapes: of their shards.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def label(self) -> str:
        """Name in records and tables: ``"dp"``, ``"dp+tp"``, ``"pp+dp"`` for a leaf that is tied over stages."""
        return "+".join(self.axes) or "none"

    @cached_property
    def elements(self) -> int:
        """Length of the flat buffer, alignment included."""
        return sum(aligned(prod(shape)) for shape in self.shapes)

    def places(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Path, shape of the shard and first element in the flat buffer, of each leaf."""
        start = 0
        for path, shape in zip(self.paths, self.shapes, strict=True):
            yield path, shape, start
            start += aligned(prod(shape))


def aligned(elements: int) -> int:
    """Rounded up to the alignment."""
    return -(-elements // ALIGNMENT) * ALIGNMENT


def buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """The buckets of one rank; those of one set of ranks are in the same order on all of them.

    Leaves that owe the same ranks are cut at ``plan.bucket_mb``, in the order in which their gradients become ready: those of
    the last layers first. A leaf goes by the first layer of the whole model that reads it, on whatever stage that is, so
    the owners of a tied leaf cut alike.
    """
    grouped: dict[tuple[int, ...], list[str]] = {}
    for path in _as_ready(plan, rank):
        grouped.setdefault(plan.specs[path].payers(plan.mesh, rank), []).append(path)
    return tuple(
        _bucket(plan, ranks, paths) for ranks, found in sorted(grouped.items()) for paths in _capped(plan, found)
    )


def groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Every set of ranks that some bucket or some map of the user sums over, in one order for all ranks."""
    owed = {(spec.pending, spec.owners) for spec in plan.specs.values() if spec.pending}
    found = set()
    for axes, owners in owed | plan.map_groups:
        for group in plan.mesh.groups(*axes):
            found.add(tuple(rank for rank in group if plan.mesh.coords(rank).pp in owners))
    return tuple(sorted(group for group in found if len(group) > 1))


def contributions(plan: Plan, pp: int) -> dict[str, int]:
    """How often in a step the ranks at a pp coordinate add to each leaf's gradient: once a microbatch and layer."""
    found: dict[str, int] = {}
    for layer in plan.layers_on(pp):
        for path in layer.paths:
            if plan.specs[path].trainable:
                found[path] = found.get(path, 0) + plan.microbatches
    return found


def _as_ready(plan: Plan, rank: int) -> list[str]:
    """The trainable leaves of a rank, those that the last layers read first."""
    first: dict[str, int] = {}
    for i, layer in enumerate(plan.model.all_layers):
        for path in layer.paths:
            first.setdefault(path, i)
    held = (path for path in plan.held(plan.mesh.coords(rank).pp) if plan.specs[path].trainable)
    return sorted(held, key=lambda path: (-first[path], path))


def _capped(plan: Plan, paths: Sequence[str]) -> Iterator[list[str]]:
    """The leaves in order, cut before the one with which a bucket would become too large."""
    room, piece, size = plan.bucket_mb * 2**20 / ELEMENT, list[str](), 0
    for path in paths:
        elements = aligned(prod(plan.specs[path].local_shape(plan.mesh)))
        if piece and size + elements > room:
            yield piece
            piece, size = [], 0
        piece.append(path)
        size += elements
    yield piece


def _bucket(plan: Plan, ranks: tuple[int, ...], paths: Sequence[str]) -> Bucket:
    specs = [plan.specs[path] for path in paths]
    axes = tuple(axis for axis in specs[0].pending if getattr(plan.mesh, axis) > 1)
    return Bucket(ranks, axes, tuple(paths), tuple(spec.local_shape(plan.mesh) for spec in specs))
