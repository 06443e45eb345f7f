"""Memory for what a rank receives, used again as soon as a microbatch is done with it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from functional_par.trace import Abstract


class Buffers:
    """Free tensors by shape and dtype.

    Args:
        device: where they lie.
        poison: fill every buffer with NaN (the largest integer, True) whenever nobody's value is in it: what is read before it
            was received, or after it was given back, then shows in every result.
    """

    def __init__(self, device: torch.device, poison: bool) -> None:
        self.device, self.poison = device, poison
        self.made = 0
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._memory: set[int] = set()

    def take(self, like: Abstract) -> Tensor:
        """A buffer for a leaf; what is in it is arbitrary."""
        free = self._free.get((like.shape, like.dtype))
        if free:
            return free.pop()
        x = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        self.made += 1
        self._memory.add(x.untyped_storage()._cdata)
        self._clear(x)
        return x

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        """Nobody reads these any more."""
        for x in buffers:
            self._clear(x)
            self._free.setdefault((tuple(x.shape), x.dtype), []).append(x)

    def forget(self) -> None:
        """Let go of the buffers that nobody uses."""
        for free in self._free.values():
            self._memory.difference_update(x.untyped_storage()._cdata for x in free)
            self.made -= len(free)
        self._free.clear()

    def owned(self, x: Tensor) -> Tensor:
        """``x``, or a copy if it lies in one of these buffers, whose next user would overwrite it."""
        return x.clone() if x.untyped_storage()._cdata in self._memory else x

    def stand_in(self, like: Abstract) -> Tensor:
        """For a leaf that a stage hands on and does not read: its shape in almost no memory, and no value to read."""
        return torch.full((), garbage(like.dtype), dtype=like.dtype, device=self.device).expand(like.shape)

    def _clear(self, x: Tensor) -> None:
        if self.poison:
            x.fill_(garbage(x.dtype))


def garbage(dtype: torch.dtype) -> float | int | bool:
    """A value that no result survives."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max
