"""The types of the trace: what is known of one tensor without its numbers, first of all the axes over which it varies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from functional_par.comm.base import Op
from functional_par.mesh import AXES
from functional_par.trace.place import Place

Axes = frozenset[str]
NONE: Axes = frozenset()


@dataclass(frozen=True)
class Source:
    """A leaf, on the way to which a value has come to owe ``owed``."""

    path: str
    owed: Axes = NONE


@dataclass(frozen=True)
class Value:
    """What the trace knows of one tensor.

    Attributes:
        axes: the axes over which it varies.
        alike: those of ``axes`` along which all ranks yet hold the same numbers, since it became varying by ``pvary`` or by
            a gather and has met nothing that differs.
        grad: whether a cotangent flows back into it.
        data: whether it was computed from the batch (activations are), as opposed to parameters and constants alone.
        sources: the leaves that it is a function of, while it depends on nothing but leaves and constants.
        closed: axes over which something on the way from its sources varied and was then made the same again; a debt
            over these can no longer be carried back to the leaf.
        cotangent: whether it was computed from a cotangent, while the backward of a layer is followed.
        mixed: axes along which cotangents that are the same on every rank and others that differ have been added up.
    """

    axes: Axes = NONE
    alike: Axes = NONE
    grad: bool = False
    data: bool = False
    sources: frozenset[Source] = frozenset()
    closed: Axes = NONE
    cotangent: bool = False
    mixed: Axes = NONE


CONSTANT = Value()


@dataclass(frozen=True)
class Abstract:
    """Shape, dtype and type of one leaf of a traced pytree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Value = CONSTANT

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """A meta tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Use:
    """One place where a leaf, or a function of leaves alone, meets data."""

    source: Source
    layer: str
    place: Place

    def __str__(self) -> str:
        return f"layer {self.layer!r}, {self.place}"


class Collective(NamedTuple):
    """One call of a collective in a layer, which all ranks along the axes make.

    Attributes:
        op: what it does.
        axes: of more than one rank each, in mesh order.
        nbytes: size of the local input.
    """

    op: Op
    axes: tuple[str, ...]
    nbytes: int


def union(values: Iterable[Value]) -> Axes:
    """All axes over which any of the values varies."""
    return NONE.union(*(v.axes for v in values))


def together(values: Iterable[Value]) -> Axes:
    """The axes along which what is computed from the values varies by its type alone: nothing in it differs."""
    values = list(values)
    return union(values) - NONE.union(*(v.axes - v.alike for v in values))


def constant(values: Iterable[Value]) -> Value:
    """What is computed from the values without a way back for a cotangent."""
    return _constant(tuple(values))


@lru_cache(maxsize=1024)
def _constant(values: tuple[Value, ...]) -> Value:
    cotangents = [v for v in values if v.cotangent]
    mixed = NONE
    if cotangents:
        both = union(cotangents) - cotangents[0].axes.intersection(*(v.axes for v in cotangents))
        # What multiplies a cotangent and differs makes all of it differ.
        mixed = both.union(*(v.mixed for v in cotangents)) - union(v for v in values if not v.cotangent)
    data = any(v.data for v in values)
    return Value(union(values), together(values), data=data, cotangent=bool(cotangents), mixed=mixed)


def order(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes in mesh order."""
    return tuple(axis for axis in AXES if axis in set(axes))


def names(axes: Iterable[str]) -> str:
    """The axes for a sentence."""
    return " and ".join(axes)


def quoted(axes: Iterable[str]) -> str:
    """The axes as arguments of a call."""
    return ", ".join(map(repr, axes))
