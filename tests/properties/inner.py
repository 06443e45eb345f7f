"""The inner product of the types: varying values are summed over the ranks, a replicated value counts once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Pairing:
    """What the dot test compares: <A x, c> and <x, A^T c>, each in the inner product of its type."""

    forward: float
    backward: float
    scale: float

    @property
    def holds(self) -> bool:
        return abs(self.forward - self.backward) <= TOLERANCE * max(1.0, self.scale)


def inner(left: Sequence[Tensor], right: Sequence[Tensor], replicated: bool) -> float:
    """<left, right> of the values of all ranks."""
    dots = [torch.dot(a.flatten(), b.flatten()).item() for a, b in zip(left, right, strict=True)]
    return dots[0] if replicated else sum(dots)


def pairing(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    pulled: Sequence[Tensor],
    replicated_in: bool,
    replicated_out: bool,
) -> Pairing:
    """The dot test of a linear map ``x -> y`` whose pullback took ``cotangents`` to ``pulled``; one entry a rank."""
    scale = sum(inner([a.abs()], [b.abs()], True) for a, b in zip(y, cotangents, strict=True))
    return Pairing(inner(y, cotangents, replicated_out), inner(x, pulled, replicated_in), scale)


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """max|a-b| <= 1e-10 max(1, max|b|), empty tensors too."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    if expected.numel():
        worst = (actual - expected).abs().max().item()
        assert worst <= TOLERANCE * max(1.0, expected.abs().max().item()), (what, worst)
