"""The initial state of one rank: it draws just what it holds, the same values in every layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from functional_par.bucket import Slice
from functional_par.buckets import slices
from functional_par.comm.base import World
from functional_par.model import init_leaf
from functional_par.optim.base import Optimizer
from functional_par.plan import Plan
from functional_par.precision import Precision
from functional_par.state import State
from functional_par.zero.parts import together


def initial(plan: Plan, world: World, optimizer: Optimizer, seed: int, precision: Precision) -> State:
    """See ``Step.init``. Values are drawn in the dtype of the master and then rounded."""
    cut = slices(plan, world.rank)
    parameters = cut if plan.zero == 3 else {}
    drawn = {}
    for path in plan.held(world.coords.pp):
        drawn[path] = _draw(plan, world, path, seed, precision.master, parameters.get(path))
    params = together(plan, world.rank, {path: leaf.to(precision.compute) for path, leaf in drawn.items()})
    return State(0, seed, params, optimizer.init(trained(plan, drawn if precision.mastered else params, cut)))


def trained(plan: Plan, params: Mapping[str, Tensor], cut: Mapping[str, Slice]) -> dict[str, Tensor]:
    """What of the parameters of one rank its optimizer moves."""
    return {
        path: cut[path].of(leaf) if path in cut and plan.zero < 3 else leaf
        for path, leaf in params.items()
        if plan.specs[path].trainable
    }


def _draw(plan: Plan, world: World, path: str, seed: int, dtype: torch.dtype, piece: Slice | None) -> Tensor:
    """A rank's shard of a leaf, or its slice of that."""
    spec = plan.specs[path]
    starts, shape = spec.starts(plan.mesh, world.coords), spec.local_shape(plan.mesh)

    def block(first: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        place = tuple(a + b for a, b in zip(starts, first, strict=True))
        return init_leaf(seed, path, plan.model.leaves[path], place, size, dtype, world.device)

    if piece is None:
        return block((0,) * len(shape), shape)
    parts = [block(first, size).flatten() for first, size in blocks(shape, piece.start, piece.stop)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=dtype, device=world.device)


def blocks(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The range of elements of a flattened tensor as blocks (first index, size), in order.

    >>> list(blocks((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = 1
    for size in shape[1:]:
        row *= size
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:
        yield from (((start // row, *a), (1, *n)) for a, n in blocks(shape[1:], start % row, (stop - 1) % row + 1))
        return
    yield from (((first - 1, *a), (1, *n)) for a, n in blocks(shape[1:], start - (first - 1) * row, row) if start % row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from (((last, *a), (1, *n)) for a, n in blocks(shape[1:], 0, stop - last * row) if stop % row)
