"""Which kind of wrong two values are: a factor, another order, the first chunk everywhere, one term too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from functional_par.audit.layout import Grid, Layout, candidates, close, distance, join
from functional_par.plan import Plan

LINEAR_ENOUGH = 1e-7
"""Relative error up to which one factor explains a difference."""


def ratio(value: Tensor, truth: Tensor) -> float | None:
    """By which factor ``value`` is ``truth``, where one factor explains it; None where none does."""
    if value.shape != truth.shape or not truth.is_floating_point() or not truth.numel():
        return None
    square = (truth * truth).sum().item()
    if not square:
        return None
    factor = float((value * truth).sum().item() / square)
    scale = truth.abs().max().item() * max(1.0, abs(factor))
    return factor if distance(value, factor * truth) <= LINEAR_ENOUGH * scale else None


def factor_of(whole: Tensor, grid: Grid) -> float | None:
    """The factor, other than one, by which the grid is the whole value in some layout; the one nearest to one of a layout in
    which the ranks agree, or have chunks, before one of a sum."""
    for summed in (False, True):
        for layout in candidates(whole.shape, grid):
            if ("sum" in (layout.rows, layout.tp)) != summed or "max" in (layout.rows, layout.tp):
                continue
            joined = join(grid, layout, whole.shape)
            factor = None if joined is None else ratio(joined, whole)
            if factor is not None and (whole.numel() > 1 or _is_telling(factor)):
                return factor
    return None


def _is_telling(factor: float) -> bool:
    """Whether it is a small integer, or one over it: of a single number any factor is some factor."""
    return any(
        abs(abs(f) - round(abs(f))) < LINEAR_ENOUGH and abs(f) < 100 for f in (factor, 1 / factor if factor else 0.0)
    )


def joins(whole: Tensor, grid: Grid, **fixed: str) -> Iterator[tuple[Layout, Tensor]]:
    """Every way to put the grid together that fits the shape, with given lies along some axis."""
    for layout in candidates(whole.shape, grid):
        if all(getattr(layout, axis) == lie for axis, lie in fixed.items()):
            joined = join(grid, layout, whole.shape)
            if joined is not None:
                yield layout, joined


def extra_term(whole: Tensor, grid: Grid, axis: str, terms: Mapping[str, Tensor]) -> str | None:
    """The name of the value, other than the sum itself, that is in the sum once a rank rather than once; None if none is."""
    n = len(grid) if axis == "rows" else len(grid[0])
    if n == 1 or not whole.is_floating_point():
        return None
    terms = {name: term for name, term in terms.items() if not close(term, whole)}
    for _, joined in joins(whole, grid, **{axis: "sum"}):
        for name, term in terms.items():
            for sign in (1, -1):
                if _is_multiple(joined - whole, term, sign * (n - 1)):
                    return name
    return None


def lost_part(whole: Tensor, grid: Grid, axis: str, terms: Mapping[str, Tensor]) -> str | None:
    """The name of the value of which only the part 1/n is in the result, the same on every rank."""
    n = len(grid) if axis == "rows" else len(grid[0])
    if n == 1 or not whole.is_floating_point():
        return None
    for _, joined in joins(whole, grid, **{axis: "same"}):
        for name, term in terms.items():
            for sign in (1, -1):
                if _is_multiple(joined - whole, term, sign * (1 / n - 1)):
                    return name
    return None


def first_chunk(whole: Tensor, grid: Grid) -> str:
    """The axis along which every rank has the chunk of the first; empty if there is none."""
    parts = [part for parts in grid for part in parts]
    shape = parts[0].shape
    if len(shape) != whole.ndim or any(part.shape != shape for part in parts):
        return ""
    n_rows, n_tp = len(grid), len(grid[0])
    dims = range(whole.ndim)
    for rows, tp in product([None, *dims], dims):
        if n_tp > 1 and _fits(whole, shape, rows, tp, n_rows, n_tp):
            pieces = [whole] * n_rows if rows is None else list(whole.chunk(n_rows, rows))
            firsts = [piece.narrow(tp, 0, shape[tp]) for piece in pieces]
            if all(close(part, firsts[p]) for p, parts in enumerate(grid) for part in parts):
                return "tp"
    for rows in dims:
        same = all(shape[d] == whole.shape[d] for d in dims if d != rows)
        if same and n_rows > 1 and shape[rows] * n_rows == whole.shape[rows]:
            first = whole.narrow(rows, 0, shape[rows])
            if all(close(part, first) for part in parts):
                return "rows"
    return ""


def another_order(whole: Tensor, grid: Grid) -> bool:
    """Whether the ranks hold the right numbers in another order."""
    if whole.is_complex() or whole.numel() < 2:
        return False
    in_order = whole.flatten().sort().values
    return any(
        not {"sum", "max"} & {layout.rows, layout.tp}
        and not close(joined, whole)
        and close(joined.flatten().sort().values, in_order)
        for layout, joined in joins(whole, grid)
    )


def largest_difference(whole: Tensor, grid: Grid, same: bool = False) -> float:
    """The smallest, over all layouts, of the largest difference of an entry; infinite where no layout fits. ``same``: each rank
    of tp by itself has to be the whole value."""
    if not same:
        return min((distance(joined, whole) for _, joined in joins(whole, grid)), default=float("inf"))
    alone = [[[parts[t]] for parts in grid] for t in range(len(grid[0]))]
    return max(largest_difference(whole, each) for each in alone)


def axes_of_factor(factor: float, plan: Plan) -> tuple[str, ...]:
    """The axes, of which the microbatches are one, whose size is the factor, or one over it."""
    sizes = {**plan.mesh.sizes, "microbatches": plan.microbatches}
    up = factor if abs(factor) > 1 else 1 / factor
    return tuple(axis for axis, n in sizes.items() if n > 1 and axis != "pp" and abs(up - n) < LINEAR_ENOUGH * n)


def named_factor(factor: float, plan: Plan, axes: Sequence[str]) -> str:
    """The factor with the axes that it comes from: ``"2 times (tp=2)"``."""
    sizes = {**plan.mesh.sizes, "microbatches": plan.microbatches}
    names = [f"{'1 / ' if abs(factor) < 1 else ''}{axis}={sizes[axis]}" for axis in axes]
    return f"{factor:.4g} times" + (f" ({' or '.join(names)})" if names else "")


def _is_multiple(error: Tensor, term: Tensor, factor: float) -> bool:
    if not term.is_floating_point() or not term.any():
        return False
    try:
        wide = torch.broadcast_to(term, error.shape)
    except RuntimeError:
        return False
    return distance(error, factor * wide) <= LINEAR_ENOUGH * abs(factor) * term.abs().max().item()


def _fits(whole: Tensor, shape: Sequence[int], rows: int | None, tp: int, n_rows: int, n_tp: int) -> bool:
    sizes = [size * (n_rows if d == rows else 1) * (n_tp if d == tp else 1) for d, size in enumerate(shape)]
    return sizes == list(whole.shape)
