"""One rank's share of a global batch: contiguous rows, cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_par.comm.base import World
from functional_par.errors import DataError
from functional_par.model import Input, Model
from functional_par.plan import Plan


@dataclass(frozen=True)
class Share:
    """Rows of one replica, on its device; microbatch ``i`` is the ``i``-th of equal pieces, of ``rows`` rows each. The
    first row of the share is row ``start`` of the global batch."""

    fields: Mapping[str, Tensor]
    rows: int
    start: int = 0

    def microbatch(self, i: int) -> dict[str, Tensor]:
        """Fields of microbatch ``i``."""
        return {name: x[i * self.rows : (i + 1) * self.rows] for name, x in self.fields.items()}

    def first_row(self, i: int) -> int:
        """Index within the global batch of the first row of microbatch ``i``."""
        return self.start + i * self.rows

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of a microbatch's fields."""
        return {name: ((self.rows, *x.shape[1:]), x.dtype) for name, x in self.fields.items()}


def share_of(plan: Plan, world: World, batch: Any, dtype: torch.dtype = torch.float32) -> Share:
    """Read this rank's rows of a global batch; floating-point fields become ``dtype``, as the parameters are.

    Raises:
        DataError: no rows, rows that replicas and microbatches do not divide, another number of rows than was asked for, or
            fields that the model does not take.
    """
    if isinstance(batch, Mapping):
        whole = batch
        size = _common_size(batch)

        def read(start: int, stop: int) -> Mapping[str, Tensor]:
            return {name: x[start:stop] for name, x in whole.items()}

    elif hasattr(batch, "rows") and hasattr(batch, "size"):
        size, read = batch.size, batch.rows
    else:
        raise DataError(
            f"a batch is a dict of tensors, or has .size and .rows(start, stop); this is {type(batch).__name__}."
        )
    if isinstance(size, bool) or not isinstance(size, int):
        raise DataError(f"batch.size is {size!r}: it is the number of rows, an integer.")
    pieces = plan.pieces
    if size < 1 or size % pieces:
        factors = " * ".join(f"{axis}={getattr(plan.mesh, axis)}" for axis in plan.data_axes)
        replicas = f"{factors} replicas" if factors else "1 replica"
        raise DataError(
            f"a batch of {size} rows does not divide into {replicas} times {plan.microbatches} microbatches "
            f"({size} / {pieces}). Use a multiple of {pieces} rows."
        )
    share, index = size // plan.replicas, plan.replica(world.rank)
    start, stop = index * share, (index + 1) * share
    fields = dict(read(start, stop))
    if (got := _common_size(fields)) != share:
        raise DataError(f"batch.rows({start}, {stop}) returned {got} rows, but {share} were asked for.")
    _check_fields(plan.model, fields)
    there = {name: x.to(world.device, dtype if x.is_floating_point() else x.dtype) for name, x in fields.items()}
    return Share(there, share // plan.microbatches, start)


def _common_size(batch: Mapping[str, Tensor]) -> int:
    for name, x in batch.items():
        if not isinstance(x, Tensor) or x.dim() < 1:
            raise DataError(f"batch[{name!r}] is not a tensor whose dim 0 is the rows.")
    sizes = {name: len(x) for name, x in batch.items()}
    if len(set(sizes.values())) != 1:
        raise DataError(f"the fields of a batch have one number of rows; these have {sizes}.")
    return next(iter(sizes.values()))


def _check_fields(model: Model, fields: Mapping[str, Tensor]) -> None:
    expected: Mapping[str, Input] = model.batch or {}
    if set(fields) != set(expected):
        raise DataError(f"the model takes the fields {sorted(expected)}, but the batch has {sorted(fields)}.")
    for name, given in expected.items():
        x = fields[name]
        fits = x.dim() == len(given.shape) and all(
            want is None or want == got for want, got in zip(given.shape[1:], x.shape[1:], strict=True)
        )
        same = x.dtype == given.dtype or (x.is_floating_point() and given.dtype.is_floating_point)
        if not fits or not same:
            raise DataError(
                f"batch[{name!r}] is {x.dtype}{list(x.shape)}, but the model takes {given.dtype}{list(given.shape)} "
                "(None is any size)."
            )
