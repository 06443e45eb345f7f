"""A user's map on gradients or updates, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

from functional_par.maps.leaf import Leaf

Phase = Literal["local", "reduced", "update"]

LeafFunction = Callable[[Tensor, Leaf], Tensor]
"""From this rank's shard of a leaf's gradient, or update, to another of the same shape and dtype."""


@dataclass(frozen=True)
class GradientMap:
    """One map.

    Attributes:
        name: for messages and tables; no two maps of a program share one.
        phase: ``"local"``: before any sum over ranks; ``"reduced"``: after, before norm and clipping; ``"update"``: on what
            the optimizer adds to the parameters.
        function: see ``LeafFunction``.
        leaves: patterns of the paths that it acts on, as in ``fnmatch``.
    """

    name: str
    phase: Phase
    function: LeafFunction
    leaves: tuple[str, ...]

    def acts_on(self, path: str) -> bool:
        """Whether a pattern matches the path."""
        return any(fnmatchcase(path, pattern) for pattern in self.leaves)
