"""Paying the debts: every leaf's gradient is summed once over exactly the ranks that hold a part of it.

Leaves that owe the same set of ranks share one flat buffer, a *bucket*, and one collective a step on the merged group, so
every copy of a leaf gets the same bits. Nothing else in the library reduces a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from functional_par.comm.base import AllReduce, World
from functional_par.mesh import Coords
from functional_par.plan import Plan
from functional_par.shards import zero_padding

ALIGNMENT = 16
"""Elements to which a leaf's place in a bucket is rounded, so that its bits do not depend on its neighbours."""


@dataclass(frozen=True)
class Bucket:
    """Leaves whose gradients are summed over the same ranks.

    Attributes:
        ranks: who pays together, in rank order; a single rank when nothing is owed.
        axes: what the sum runs along, for people.
        paths: the leaves in sorted order, the same on every rank of the bucket.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    paths: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name in records and tables: ``"dp"``, ``"dp+tp"``, ``"pp+dp"`` for a leaf that is tied over stages."""
        return "+".join(self.axes) or "none"

    def elements(self, plan: Plan) -> int:
        """Length of the flat buffer, alignment included."""
        return sum(_aligned(prod(plan.specs[path].local_shape(plan.mesh))) for path in self.paths)


def buckets(plan: Plan, rank: int) -> tuple[Bucket, ...]:
    """The buckets of one rank, in an order on which all ranks agree."""
    grouped: dict[tuple[int, ...], list[str]] = {}
    axes: dict[tuple[int, ...], tuple[str, ...]] = {}
    for path in sorted(plan.held(plan.mesh.coords(rank).pp)):
        spec = plan.specs[path]
        if spec.trainable:
            ranks = spec.payers(plan.mesh, rank)
            grouped.setdefault(ranks, []).append(path)
            owed = tuple(axis for axis in spec.pending if getattr(plan.mesh, axis) > 1)
            axes.setdefault(ranks, owed)
    return tuple(Bucket(ranks, axes[ranks], tuple(paths)) for ranks, paths in sorted(grouped.items()))


def groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Every set of ranks that some bucket or some map of the user sums over, in one order for all ranks."""
    owed = {(spec.pending, spec.owners) for spec in plan.specs.values() if spec.pending}
    found = set()
    for axes, owners in owed | plan.map_groups:
        for group in plan.mesh.groups(*axes):
            found.add(tuple(rank for rank in group if plan.mesh.coords(rank).pp in owners))
    return tuple(sorted(group for group in found if len(group) > 1))


class Gradients:
    """Accumulation buffers of one rank: a flat tensor a bucket, a view a leaf. Used for one step at a time.

    The first gradient of a leaf is written, later ones are added, in the order of the calls. With ``poison`` the memory is
    filled with NaN before.
    """

    def __init__(
        self, plan: Plan, owed: tuple[Bucket, ...], dtype: torch.dtype, device: torch.device, poison: bool = False
    ) -> None:
        self.buckets, self.poison = owed, poison
        self.flat = [torch.zeros(bucket.elements(plan), dtype=dtype, device=device) for bucket in owed]
        self.leaves: dict[str, Tensor] = {}
        for bucket, flat in zip(owed, self.flat, strict=True):
            self.leaves |= _views(plan, bucket, flat)
        self.begin()

    def begin(self) -> None:
        """Forget the step before: the next gradient of each leaf is the first."""
        self._unwritten = set(self.leaves)
        for flat in self.flat if self.poison else ():
            flat.fill_(torch.nan)

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Accumulate one layer's gradients of one microbatch."""
        for path, grad in grads.items():
            buffer, first = self.buffer(path)
            if first:
                buffer.copy_(grad)
            else:
                buffer.add_(grad)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        """The memory of a leaf's gradient, to which the caller adds now; True if it is the first, which overwrites."""
        first = path in self._unwritten
        self._unwritten.discard(path)
        return self.leaves[path], first

    def complete(self, plan: Plan, coords: Coords) -> None:
        """After the last microbatch: zero where no gradient came, and where it flowed into the padding of an uneven shard
        (the transpose of padding with zeros forgets it)."""
        for path in self._unwritten:
            self.leaves[path].zero_()
        for path, grad in self.leaves.items():
            zero_padding(plan.specs[path], plan.mesh, coords, grad)

    def pay(self, world: World) -> None:
        """Sum every bucket over its ranks: one collective a bucket, all in flight together."""
        handles = [
            world.subgroup(bucket.ranks, bucket.label).start(AllReduce(), flat, donate=True)
            for bucket, flat in zip(self.buckets, self.flat, strict=True)
            if len(bucket.ranks) > 1
        ]
        summed = iter([handle.wait() for handle in handles])
        for i, bucket in enumerate(self.buckets):
            if len(bucket.ranks) > 1:
                self.flat[i] = next(summed)

    def views(self, plan: Plan) -> dict[str, Tensor]:
        """Gradient of each leaf, as views of the buckets."""
        self.leaves = {}
        for bucket, flat in zip(self.buckets, self.flat, strict=True):
            self.leaves |= _views(plan, bucket, flat)
        return self.leaves


def _views(plan: Plan, bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    views, start = {}, 0
    for path in bucket.paths:
        shape = plan.specs[path].local_shape(plan.mesh)
        views[path] = flat[start : start + prod(shape)].view(shape)
        start += _aligned(prod(shape))
    return views


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
