"""How the values of all ranks make up the value of one process: the same on every rank, one chunk each, or terms of a sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

TOLERANCE = 1e-10
"""Largest difference, relative to ``max(0.1, largest entry)``."""

Lie = Literal["same", "sum", "max"] | int
"""Along one axis: the same on every rank, terms of a sum, of a maximum, or chunks along this dim."""

Grid = Sequence[Sequence[Tensor]]
"""``grid[piece][tp]``: a value on the ranks that worked on one piece of the batch, for each piece in the order of its rows."""


@dataclass(frozen=True)
class Layout:
    """What explains a grid.

    Attributes:
        rows: how the pieces of the batch relate.
        tp: how the tensor-parallel ranks of one piece relate.
        padding: entries beyond the end along the dim that tp cuts.
    """

    rows: Lie
    tp: Lie
    padding: int = 0

    def __str__(self) -> str:
        return f"rows: {_told(self.rows)}, tp: {_told(self.tp)}"


def find(whole: Tensor, grid: Grid, rows: Lie | None = None, tp: Lie | None = None) -> Layout | None:
    """The simplest layout, of those with the given lies, in which the grid is the whole value; None if none is."""
    for layout in candidates(whole.shape, grid):
        if rows not in (None, layout.rows) or tp not in (None, layout.tp):
            continue
        joined = join(grid, layout, whole.shape)
        if joined is not None and close(joined, whole, grid):
            return layout
    return None


def candidates(shape: Sequence[int], grid: Grid) -> Iterator[Layout]:
    """Every layout that fits the shapes, likely ones first."""
    local, n_rows, n_tp = grid[0][0].shape, len(grid), len(grid[0])
    if len(local) != len(shape) or any(part.shape != local for parts in grid for part in parts):
        return
    for tp, rows in product(_lies(len(shape), n_tp), _lies(len(shape), n_rows)):
        sizes = [size * (n_rows if d == rows else 1) * (n_tp if d == tp else 1) for d, size in enumerate(local)]
        padding = sizes[tp] - shape[tp] if isinstance(tp, int) else 0
        if isinstance(tp, int) and padding > 0 and -(-shape[tp] // n_tp) == local[tp]:
            sizes[tp] = shape[tp]
        if sizes == list(shape):
            yield Layout(rows, tp, padding)


def join(grid: Grid, layout: Layout, shape: Sequence[int]) -> Tensor | None:
    """The value that the grid is in this layout; None where copies are not the same."""
    pieces = []
    for parts in grid:
        joined = _join(list(parts), layout.tp)
        if joined is None:
            return None
        if isinstance(layout.tp, int) and layout.padding:
            joined = joined.narrow(layout.tp, 0, shape[layout.tp])
        pieces.append(joined)
    return _join(pieces, layout.rows)


def close(a: Tensor, b: Tensor, grid: Grid = ()) -> bool:
    """Equal to the tolerance; sums may have terms, those of the grid, that are larger than they are."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a.to(torch.int64), b.to(torch.int64))
    scale = max([0.1, _size(b), *(_size(part) for parts in grid for part in parts)])
    return distance(a, b) <= TOLERANCE * scale


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference of two entries; infinite where only one of them is finite."""
    if a.shape != b.shape:
        return torch.inf
    if not b.numel():
        return 0.0
    wide = torch.promote_types(b.dtype, torch.float64)
    a, b = a.to(wide), b.to(wide)
    far = torch.where(a == b, 0.0, (a - b).abs())
    return torch.where(far.isnan(), torch.inf, far).max().item()


def _size(x: Tensor) -> float:
    x = x.abs()
    return x[x.isfinite()].max().item() if x.isfinite().any() else 0.0


def _lies(ndim: int, n: int) -> list[Lie]:
    return ["same"] if n == 1 else ["same", *range(ndim), "sum", "max"]


def _join(parts: list[Tensor], lie: Lie) -> Tensor | None:
    if isinstance(lie, int):
        return torch.cat(parts, lie)
    if lie == "same":
        return parts[0] if all(close(part, parts[0]) for part in parts[1:]) else None
    stacked = torch.stack(parts)
    stacked = stacked.to(torch.int64) if stacked.dtype == torch.bool else stacked
    if lie == "max":
        return None if stacked.is_complex() else stacked.amax(0)
    return stacked.sum(0)


def _told(lie: Lie) -> str:
    return {"same": "the same", "sum": "terms of a sum", "max": "terms of a maximum"}.get(str(lie), f"cut in dim {lie}")
