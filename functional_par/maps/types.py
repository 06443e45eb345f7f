"""What a value is while a map on gradients runs: whole on every rank, one term of a sum over an axis, or one block of a
larger tensor. Unlike the types of layers these tell partial sums from blocks, since here both have names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from functional_par.errors import TraceError
from functional_par.mesh import AXES


@dataclass(frozen=True)
class Kind:
    """The type of one tensor.

    Attributes:
        partial: axes over which it is one term of a sum.
        cut: (axis, dim) pairs: it is one block, along ``dim``, of a tensor that lies over ``axis``.
    """

    partial: frozenset[str] = frozenset()
    cut: frozenset[tuple[str, int]] = frozenset()

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which it is cut."""
        return frozenset(axis for axis, _ in self.cut)

    def __str__(self) -> str:
        parts = [f"a partial sum over {listed(self.partial)}"] if self.partial else []
        parts += [f"cut along {axis} in dim {dim}" for axis, dim in sorted(self.cut)]
        return " and ".join(parts) or "whole on every rank"


WHOLE = Kind()


class NotLinear(TraceError):
    """A rule that refuses; told again with leaf and line by whoever follows the operations."""


def listed(axes: Iterable[str]) -> str:
    """Axes in mesh order, for a sentence."""
    return ", ".join(axis for axis in AXES if axis in set(axes))


def quoted(axes: Iterable[str]) -> str:
    """Axes in mesh order, as arguments of a call."""
    return ", ".join(repr(axis) for axis in AXES if axis in set(axes))


def need_no_sum(what: str, kinds: Iterable[Kind]) -> None:
    """Refuse an operation that is not linear in a partial sum."""
    if owed := frozenset().union(*(kind.partial for kind in kinds)):
        raise NotLinear(
            f"{what} of a partial sum over {listed(owed)}. It is not linear: applied to the terms it gives another result than "
            f"applied to their sum. Sum first, with leaf.psum(x, {quoted(owed)}) (leaf.owes has the axes of the gradient), or "
            "act after the reduction, with fp.on_reduced_gradients; what stands for the gradient itself, such as its largest "
            "entries, is leaf.approximate(x, by)."
        )
