"""A bucket of leaves: one flat buffer, and how it is cut in slices. Pure data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from torch import Tensor

ALIGNMENT = 16
"""Elements to which a leaf's place in a bucket is rounded, so that its bits do not depend on its neighbours."""


class Rest(NamedTuple):
    """A stretch of a bucket that is cut in slices, whose slices are summed over more axes than they are cut over.

    Attributes:
        axes: what this sum runs along.
        owners: pp coordinates of the ranks that hold its leaves.
        start, stop: within the flat buffer.
    """

    axes: tuple[str, ...]
    owners: tuple[int, ...]
    start: int
    stop: int


class Slice(NamedTuple):
    """One rank's part of a leaf: a range of the elements of its flattened shard, maybe an empty one.

    Attributes:
        start, stop: the range.
        axes: the data axes along which the shard is cut; each of its elements lies on one rank along them.
    """

    start: int
    stop: int
    axes: tuple[str, ...]

    @property
    def elements(self) -> int:
        return self.stop - self.start

    def of(self, shard: Tensor) -> Tensor:
        """This part of a shard [elements]: a view, if the shard is contiguous."""
        return shard.reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Bucket:
    """Leaves that share one flat buffer, and whose gradients are summed over the same ranks in one collective.

    Attributes:
        ranks: who pays together, in rank order; a single rank when nothing is owed.
        axes: what the sum runs along, for people.
        paths: the leaves in the order of their places, the same on every rank of the bucket.
        shapes: of their shards.
        sliced: whether each of the ranks gets the sum of its own part alone.
        rest: what of these parts is summed further.
    """

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sliced: bool = False
    rest: tuple[Rest, ...] = ()

    @property
    def label(self) -> str:
        """Name in records and tables: ``"dp"``, ``"dp+tp"``, ``"pp+dp"`` for a leaf that is tied over stages."""
        return "+".join(self.axes) or "none"

    @property
    def parts(self) -> int:
        """In how many equal parts the flat buffer is cut."""
        return len(self.ranks) if self.sliced else 1

    @cached_property
    def part(self) -> int:
        """Length of one part."""
        return aligned(-(-sum(aligned(prod(shape)) for shape in self.shapes) // self.parts))

    @property
    def elements(self) -> int:
        """Length of the flat buffer, alignment included."""
        return self.part * self.parts

    def index(self, rank: int) -> int:
        """Which part is that rank's."""
        return self.ranks.index(rank) if self.sliced else 0

    def places(self) -> Iterator[tuple[str, tuple[int, ...], int]]:
        """Path, shape of the shard and first element in the flat buffer, of each leaf."""
        start = 0
        for path, shape in zip(self.paths, self.shapes, strict=True):
            yield path, shape, start
            start += aligned(prod(shape))

    def slices(self, index: int) -> Iterator[tuple[str, Slice, int]]:
        """Path, slice and first element in the part with that index, of each leaf."""
        low, high = index * self.part, (index + 1) * self.part
        for path, shape, start in self.places():
            first, last = max(low, start), min(high, start + prod(shape))
            if first < last:
                yield path, Slice(first - start, last - start, self.axes), first - low
            else:
                yield path, Slice(0, 0, self.axes), 0


def aligned(elements: int) -> int:
    """Rounded up to the alignment."""
    return -(-elements // ALIGNMENT) * ALIGNMENT
