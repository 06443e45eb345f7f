"""What a plan has been told of its microbatches: their shapes, by which activations go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from functional_par.errors import CompositionError
from functional_par.model import Model

if TYPE_CHECKING:
    from functional_par.plan import Fields

SLOTS = 2
"""Tensors that AdamW keeps for each leaf."""


@dataclass(frozen=True)
class Told:
    """What memory is counted with.

    Attributes:
        batch: shape of each field of a microbatch.
        dtype: of parameters and activations; None is the program's, or float32.
        slots: tensors that the optimizer keeps for each leaf.
    """

    batch: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype | None = None
    slots: int = SLOTS


def shapes_of(batch: Mapping[str, torch.Tensor | Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Shapes of fields that are tensors, or shapes already.

    >>> shapes_of({"tokens": [4, 8], "labels": torch.zeros(4, 8)})
    {'tokens': (4, 8), 'labels': (4, 8)}
    """
    return {name: tuple(x.shape) if isinstance(x, torch.Tensor) else tuple(x) for name, x in batch.items()}


def check_shapes(model: Model, batch: Mapping[str, Sequence[int]], asked: str) -> None:
    """Raise CompositionError for other fields than the model's, shapes that it does not take, or two numbers of rows.

    Args:
        model: says what it takes.
        batch: shape of each field of a microbatch.
        asked: what gave them, for messages.
    """
    known = model.batch or {}
    if set(batch) != set(known):
        raise CompositionError(
            f"{asked}: the model takes the fields {sorted(known)}, but the batch has {sorted(batch)}."
        )
    for name, given in known.items():
        shape = tuple(batch[name])
        numbers = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)
        fits = len(shape) == len(given.shape) and all(
            want in (None, got) for want, got in zip(given.shape[1:], shape[1:], strict=True)
        )
        if not numbers or not fits:
            raise CompositionError(
                f"{asked}: {name!r} has the shape {list(shape)}, but the model takes {list(given.shape)}, where None is any "
                "positive size."
            )
    if len({tuple(shape)[:1] for shape in batch.values()}) > 1:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in batch.items())
        raise CompositionError(f"{asked}: the fields of a microbatch have one number of rows, but these are {shapes}.")


def fields_of(
    model: Model, batch: Mapping[str, Sequence[int]], dtype: torch.dtype, asked: str = "MemoryBound(batch=...)"
) -> Fields:
    """Shape and dtype of each field of a microbatch of these shapes. Raises as ``check_shapes`` does."""
    check_shapes(model, batch, asked)
    known = model.batch or {}
    kinds = {name: dtype if given.dtype.is_floating_point else given.dtype for name, given in known.items()}
    return {name: (tuple(batch[name]), kinds[name]) for name in known}


def declared(model: Model, room: float) -> dict[str, tuple[int, ...]]:
    """The shapes that the model itself gives its fields, for a bound of so many bytes.

    Raises:
        CompositionError: it leaves rows or other sizes open, so that nothing says what a microbatch keeps.
    """
    known = model.batch or {}
    if not any(None in given.shape for given in known.values()):
        return {name: tuple(size or 1 for size in given.shape) for name, given in known.items()}
    such = {name: (4, *(size or 1024 for size in given.shape[1:])) for name, given in known.items()}
    open_ones = ", ".join(f"{name} {list(given.shape)}" for name, given in known.items())
    raise CompositionError(
        f"stage_pp(memory={room:.12g}): what a stage keeps goes by the rows and sizes of a microbatch, which the model leaves "
        f"open ({open_ones}). Give them, such as memory=fp.MemoryBound({room:.12g}, batch={such}), or costs=fp.measure(model, "
        "batch), whose shapes are then taken."
    )
