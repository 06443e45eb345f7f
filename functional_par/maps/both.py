"""A map does on a shard what it does on the whole leaf: the same operations, with the same numbers, on tensors of which the cut
dims alone differ in size. What depends on the size of a shard depends on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn

from functional_par.errors import ModelError
from functional_par.maps.types import Kind

_VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
"""Names of one operation; which of them torch takes is a matter of strides."""

_COPIES = ("clone", "alias", "detach", "lift_fresh")

_SIZES = ("size", "shape", "split_sizes", "stride", "repeats", "storage_offset")
"""Arguments that say sizes, which the shapes of the results tell anyway."""


@dataclass(frozen=True)
class Did:
    """One operation.

    Attributes:
        name: of the operation.
        numbers: its arguments that are numbers, as ``name=value``.
        results: shape and kind of each tensor that it gives.
    """

    name: str
    numbers: tuple[str, ...]
    results: tuple[tuple[tuple[int, ...], Kind], ...]

    @property
    def telling(self) -> bool:
        """Whether torch does it always, or where strides make it."""
        return self.name not in _COPIES


def numbers_of(bound: Mapping[str, Any]) -> tuple[str, ...]:
    """The numbers among the arguments of an operation. Written out, since some are not equal to themselves."""
    return tuple(f"{name}={x}" for name, x in bound.items() if name not in _SIZES and _is_number(x))


def _is_number(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return all(isinstance(y, (int, float)) for y in x)
    return isinstance(x, (int, float, complex))


class Both:
    """Compares the operations on a shard, one by one as they come, with those on the whole leaf.

    Args:
        whole: what was done on the whole leaf.
        extents: for each axis that cuts the leaf, the size of that dim and of a shard's.
    """

    def __init__(self, whole: Sequence[Did], extents: Mapping[str, tuple[int, int]]) -> None:
        self.whole = [each for each in whole if each.telling]
        self.extents = extents
        self.at = 0

    def compare(self, each: Did) -> None:
        """Raise ModelError for an operation that is another one, has other numbers, or other sizes."""
        if not each.telling:
            return
        other = self.whole[self.at] if self.at < len(self.whole) else None
        self.at += 1
        if other is None or (each.name != other.name and not {each.name, other.name} <= {*_VIEWS}):
            self._branches(each.name, other.name if other else "nothing")
        if each.numbers != other.numbers:
            mine, its = next((a, b) for a, b in zip_longest(each.numbers, other.numbers) if a != b)
            raise ModelError(
                f"{each.name} with {mine}, a number that depends on how the leaf is cut: for the whole leaf it is {its}. Sizes "
                "are those of the shard here; leaf.shape has those of the leaf, the same in every layout."
            )
        for (shape, kind), (whole, _) in zip(each.results, other.results, strict=False):
            self._shapes(each.name, shape, whole, kind)

    def kind_of_view(self, name: str) -> Kind | None:
        """The kind of the view that is next, which a dim of one entry in the shard hides."""
        next_one = self.whole[self.at] if self.at < len(self.whole) else None
        return next_one.results[0][1] if next_one and {name, next_one.name} <= {*_VIEWS} else None

    def end(self) -> None:
        """Raise ModelError if more is done on the whole leaf."""
        if self.at < len(self.whole):
            self._branches("nothing", self.whole[self.at].name)

    def _branches(self, mine: str, its: str) -> NoReturn:
        raise ModelError(
            f"it does another thing ({mine}) on the shard of a leaf than on the whole ({its}), so its result would depend on "
            "how the leaf is cut. Branch on leaf.shape, the same in every layout, not on the size of a tensor."
        )

    def _shapes(self, name: str, shape: tuple[int, ...], whole: tuple[int, ...], kind: Kind) -> None:
        cut = {dim: self.extents[axis] for axis, dim in kind.cut if axis in self.extents}
        same = len(shape) == len(whole) and all(
            mine * cut.get(dim, (1, 1))[0] == its * cut.get(dim, (1, 1))[1]
            for dim, (mine, its) in enumerate(zip(shape, whole, strict=True))
        )
        if not same:
            raise ModelError(
                f"{name} gives a tensor that is {kind}, of shape {list(shape)}, but {list(whole)} for the whole leaf: its size "
                "depends on how the leaf is cut. Take sizes from leaf.shape, let tensors broadcast, and leave blocks in the "
                "dim that is cut: ones_like and the like are cut as their argument."
            )
