"""The parameters and the batch of an audit: small, seeded, the same in every layout, and without the zeros that hide errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from functional_par import init, tree
from functional_par.errors import DataError, ModelError
from functional_par.init import materialize
from functional_par.model import Input, Model
from functional_par.plan import Plan
from functional_par.random import key
from functional_par.run_par import RunPar
from functional_par.testing.batch import fields_of, make_batch

MOST_PARAMETERS = 4_000_000
"""Whole leaves in float64 are 32 MB, held by every rank in its share and by the single process."""

MOST_WORK = 2e10
"""Floating-point operations of one forward on all rows; a few times this is done, on one process."""

ROWS = 2
"""Rows of each piece of a batch that is made up."""

NOISE = 0.5
"""Of a weight's rows, in norm; a tenth of it for leaves of one dim."""


def parameters(model: Model, seed: int) -> dict[str, Tensor]:
    """Initial values plus noise, whole, float64: leaves that start at zero or one would hide what is wrong with them."""
    whole = tree.flatten(model.init(seed, torch.float64))
    for path, leaf in model.leaves.items():
        std = NOISE / math.sqrt(math.prod(leaf.shape[1:])) if len(leaf.shape) > 1 else NOISE / 5
        noise = materialize(init.normal(std), key(seed).fold("audit").fold(path), leaf.shape, dtype=torch.float64)
        whole[path] = whole[path] + noise
    return whole


def check_size(model: Model) -> None:
    """ModelError for a model that cannot be run small."""
    total = sum(math.prod(leaf.shape) for leaf in model.leaves.values())
    if total > MOST_PARAMETERS:
        largest = max(model.leaves, key=lambda path: math.prod(model.leaves[path].shape))
        raise ModelError(
            f"audit: the model has {total:,} parameters, and it runs in float64 on every rank of this process; at most "
            f"{MOST_PARAMETERS:,} are audited. Build it with fewer layers and smaller dims (the largest leaf is {largest}, "
            f"{list(model.leaves[largest].shape)}): mistakes do not depend on the size."
        )


def check_work(plan: Plan, batch: Mapping[str, Tensor] | None) -> None:
    """ModelError for a batch, None for one that is made up, on which one forward would take minutes."""
    pieces = plan.pieces
    if batch is None:
        shapes = {
            name: ((ROWS, *(_open_size(plan) if n is None else n for n in given.shape[1:])), _wide(given.dtype))
            for name, given in (plan.model.batch or {}).items()
        }
    else:
        shapes = {name: ((max(len(x) // pieces, 1), *x.shape[1:]), x.dtype) for name, x in batch.items()}
    traced = plan.trace(shapes, torch.float64)
    work = sum(layer.work for layer in traced.layers.values()) * pieces * plan.mesh.tp
    if work > MOST_WORK:
        rows = pieces * next(iter(shapes.values()))[0][0]
        raise ModelError(
            f"audit: one forward of {rows} rows takes about {work:.1e} operations on all ranks, at most {MOST_WORK:.0e} are "
            "done. Build the model with fewer layers, smaller dims and shorter sequences, or pass a smaller batch=...: "
            "mistakes do not depend on the size."
        )


def _open_size(plan: Plan) -> int:
    """The size of dims that the model leaves open; tp divides it."""
    return max(4, 2 * plan.mesh.tp * plan.mesh.cp)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def given_batch(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A user's batch, floating-point fields in float64."""
    if not isinstance(batch, Mapping) or not batch or not all(isinstance(x, Tensor) for x in batch.values()):
        shown = "an empty one" if isinstance(batch, Mapping) and not batch else type(batch).__name__
        raise DataError(f"audit(batch=...): a dict of tensors with all rows in dim 0, not {shown}.")
    return fields_of(batch)


def made_up_batch(plan: Plan, params: Mapping[str, Tensor], seed: int) -> tuple[dict[str, Tensor], list[str]]:
    """Two rows for each piece of the batch, and notes on what had to be guessed.

    Labels, where the model ignores those of -100, are uneven: some rows have all, some half, one none.
    """
    rows, size = ROWS * plan.pieces, _open_size(plan)
    kept = tuple((2, 1, 1, 0, 2, 1)[i % 6] for i in range(rows))
    model, notes = _with_ranges(plan.model, params, size, seed)
    # A model that counts in its own way may ignore labels of -100 too: it is tried.
    for own in (replace(model, count=None), model):
        batch = given_batch(make_batch(own, rows, seed=seed, size=size, kept=kept))
        if _finite(model, params, batch):
            break
    return batch, notes


def _with_ranges(model: Model, params: Mapping[str, Tensor], size: int, seed: int) -> tuple[Model, list[str]]:
    """The model whose integer fields all have a range: given, or the largest that its functions accept."""
    fields: dict[str, Input] = dict(model.batch or {})
    guessed = [name for name, given in fields.items() if given.high is None and _is_integer(given.dtype)]
    fields |= {name: replace(fields[name], high=1) for name in guessed}
    if guessed:
        _accepts(model, fields, params, size, seed, last=True)
    sizes = sorted({n for leaf in model.leaves.values() for n in leaf.shape}, reverse=True)
    for name in guessed:
        for high in sizes:
            wider = fields | {name: replace(fields[name], high=high)}
            if _accepts(model, wider, params, size, seed):
                fields = wider
                break
    told = ", ".join(f"{name} < {fields[name].high}" for name in guessed)
    notes = (
        [f"ids by trial, the largest that the model accepts: {told} (say so: fp.Input(..., high=...))"] if told else []
    )
    return replace(model, batch=fields), notes


def _accepts(
    model: Model, fields: Mapping[str, Input], params: Mapping[str, Tensor], size: int, seed: int, last: bool = False
) -> bool:
    """Whether the plain function gives a finite loss on such a batch."""
    own = replace(model, batch=fields)
    batch = given_batch(make_batch(own, 4, seed=seed, size=size))
    for name, given in fields.items():
        if given.high is not None and _is_integer(given.dtype):
            batch[name].view(-1)[:1] = given.high - 1  # the largest is among them
    if not last:
        return _finite(model, params, batch)
    try:
        return bool(_loss(model, params, batch).isfinite())
    except Exception as error:
        raise DataError(
            f"audit: no batch could be made up from {', '.join(fields)}: in one process the model raises "
            f"{type(error).__name__}: {error} Pass batch=..., a dict of tensors that the model takes."
        ) from error


def _finite(model: Model, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> bool:
    try:
        return bool(_loss(model, params, batch).isfinite())
    except Exception:  # whatever a model raises on ids that it does not know
        return False


def _loss(model: Model, params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(tree.unflatten(params), batch, RunPar(batch=batch, fast=False))


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
