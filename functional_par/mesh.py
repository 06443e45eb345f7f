"""The mesh: how ranks are arranged along the axes of parallelism. Pure arithmetic, never a process group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import NamedTuple

from functional_par.errors import MeshError

AXES = ("ep", "pp", "dp", "cp", "tp")
"""Axis names in the order of the rank matrix, slowest first."""

DATA_AXES = ("ep", "dp", "cp")
"""Axes along which parameters are copied and data differ."""


class Coords(NamedTuple):
    """Position of one rank along each axis."""

    ep: int
    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the five axes; rank ``r`` is the ``r``-th entry of the matrix (ep, pp, dp, cp, tp), tp fastest.

    >>> mesh = Mesh(dp=2, pp=2, tp=2)
    >>> mesh.size, mesh.coords(5)
    (8, Coords(ep=0, pp=1, dp=0, cp=0, tp=1))
    >>> mesh.rank(pp=1, tp=1)
    5
    >>> mesh.groups("pp")
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> mesh.group("dp", "tp", rank=5)
    (4, 5, 6, 7)

    Raises:
        MeshError: if a size is not a positive integer.
    """

    ep: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"Mesh({field.name}={size!r}): the size of an axis is an integer of at least 1.")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in the order of the rank matrix."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def size(self) -> int:
        """Number of ranks: the product of all five sizes."""
        return math.prod(self.sizes.values())

    def __iter__(self) -> Iterator[Coords]:
        """Coordinates of every rank, in rank order."""
        return (Coords(*c) for c in product(*(range(n) for n in self.sizes.values())))

    def coords(self, rank: int) -> Coords:
        """Coordinates of ``rank``; raises MeshError when the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not in {self}: it has ranks 0 to {self.size - 1}.")
        position = []
        for size in reversed(self.sizes.values()):
            rank, index = divmod(rank, size)
            position.append(index)
        return Coords(*reversed(position))

    def rank(self, **coords: int) -> int:
        """The rank at the given coordinates; axes left out are at 0."""
        _known_axes(coords)
        rank = 0
        for axis, size in self.sizes.items():
            index = coords.get(axis, 0)
            if not 0 <= index < size:
                raise MeshError(f"{axis}={index} is outside {self}: axis {axis} has size {size}.")
            rank = rank * size + index
        return rank

    def group(self, *axes: str, rank: int) -> tuple[int, ...]:
        """Ranks that share all coordinates of ``rank`` except those along ``axes``, in rank order."""
        _known_axes(axes)
        ranks, stride = [0], self.size
        for axis, index in zip(AXES, self.coords(rank), strict=True):
            size = getattr(self, axis)
            stride //= size
            here = range(size) if axis in axes else (index,)
            ranks = [first + stride * i for first in ranks for i in here]
        return tuple(ranks)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group along the merged ``axes``, ordered by first rank. Together they hold each rank once."""
        return tuple(sorted({self.group(*axes, rank=rank) for rank in range(self.size)}))

    def check_world(self, ranks: int) -> None:
        """Raise MeshError, with every factor, unless the mesh has exactly ``ranks`` ranks."""
        if self.size != ranks:
            factors = " * ".join(f"{axis}={n}" for axis, n in self.sizes.items())
            raise MeshError(
                f"the mesh has {factors} = {self.size} ranks, but {ranks} are running. "
                f"Start {self.size} processes (--nproc-per-node {self.size}), or change the sizes "
                f"so that their product is {ranks}."
            )

    def table(self) -> str:
        """Who is in which group: a plain-text table with one row a rank."""
        axes = [axis for axis, n in self.sizes.items() if n > 1] or ["dp"]
        merged = tuple(axis for axis in DATA_AXES if getattr(self, axis) > 1)
        columns = [(axis,) for axis in axes] + ([merged] if len(merged) > 1 else [])
        rows = [["rank", *axes, *("+".join(c) + " group" for c in columns)]]
        for rank, here in enumerate(self):
            groups = [" ".join(map(str, self.group(*column, rank=rank))) for column in columns]
            rows.append([str(rank), *(str(getattr(here, axis)) for axis in axes), *groups])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __str__(self) -> str:
        shown = {axis: n for axis, n in self.sizes.items() if n > 1} or {"dp": 1}
        return "Mesh(" + ", ".join(f"{axis}={n}" for axis, n in shown.items()) + ")"


def _known_axes(axes: Iterable[str]) -> None:
    for axis in axes:
        if axis not in AXES:
            raise MeshError(f"unknown axis {axis!r}: the axes of a mesh are {', '.join(AXES)}.")
