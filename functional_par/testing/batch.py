"""Batches made up from what a model says of its inputs (``model.batch``), for checks that bring none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_par.model import Input, Model

IGNORED = -100
"""Label of a position without a loss."""


@dataclass(frozen=True)
class Sample:
    """A batch as the few numbers that it is made from.

    Attributes:
        rows: number of rows.
        seed: of the values.
        size: of every dim, beside the rows, that the model leaves open.
        kept: for each row which of its labels are kept: 2 all, 1 about half, 0 none; rows beyond keep all. It means
            something only for a model that ``ignores_labels``.
    """

    rows: int
    seed: int = 0
    size: int = 2
    kept: tuple[int, ...] = ()

    def batch(self, model: Model) -> dict[str, Tensor]:
        """The batch that a model takes."""
        return make_batch(model, self.rows, seed=self.seed, size=self.size, kept=self.kept)


def make_batch(
    model: Model, rows: int, *, seed: int = 0, size: int = 2, kept: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """A batch of random values, a function of the arguments alone.

    Floating-point fields are standard normal, in the dtype of the field; integers are in [0, high) of their
    ``fp.Input``, or below what ``top`` finds.

    Args:
        model: whose ``batch`` says the fields.
        rows: number of rows.
        seed: of the values.
        size: of every other dim that the model leaves open (None).
        kept: see ``Sample``.

    >>> import functional_par as fp
    >>> batch = make_batch(fp.models.gpt(vocab=5, d_model=4, n_layers=1, n_heads=2, seq_len=3), rows=2, kept=(2, 0))
    >>> batch["tokens"].shape, batch["labels"][1]
    (torch.Size([2, 3]), tensor([-100, -100, -100]))
    """
    generator = torch.Generator().manual_seed(seed)
    batch = {
        name: _field(given, (rows, *(size if n is None else n for n in given.shape[1:])), top(model, given), generator)
        for name, given in (model.batch or {}).items()
    }
    if ignores_labels(model):
        labels = batch["labels"]
        share = torch.tensor([0.0, 0.5, 1.0])[torch.tensor([*kept, *[2] * rows][:rows], dtype=torch.int64)]
        labels[torch.rand(labels.shape, generator=generator) >= share.view(-1, *[1] * (labels.dim() - 1))] = IGNORED
    return batch


def ignores_labels(model: Model) -> bool:
    """Whether labels of -100 have no loss: the model has a field ``labels`` and counts its terms as ``fp.Model`` does by
    default."""
    given = (model.batch or {}).get("labels")
    return given is not None and model.count is None and not given.dtype.is_floating_point


def top(model: Model, given: Input) -> int:
    """One more than the largest integer of a field: its ``high``, else the smallest dim of a leaf that is named ``vocab``,
    else 2, which suits every table."""
    if given.high is not None:
        return given.high
    sizes = (
        size
        for leaf in model.leaves.values()
        for name, size in zip(leaf.names, leaf.shape, strict=True)
        if name == "vocab"
    )
    return min(sizes, default=2)


def _field(given: Input, shape: tuple[int, ...], high: int, generator: torch.Generator) -> Tensor:
    if given.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(given.dtype)
    if given.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    return torch.randint(high, shape, generator=generator, dtype=given.dtype)


def fields_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same batch with floating-point fields in float64."""
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
