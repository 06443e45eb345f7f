"""Initial values as a pure function of (key, global index): each rank draws just its own shard, and the shard equals
the slice of the whole bit for bit. Nothing here may touch a global generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_par import random
from functional_par.errors import ModelError
from functional_par.random import Key

_CHUNK = 1 << 18


@dataclass(frozen=True)
class Draw:
    """What an initialiser gets: random numbers for one shard of a parameter.

    Attributes:
        key: names the stream; a function of the seed and the leaf's path.
        shape: global shape of the parameter.
        starts: global index of the shard's first element, along each dim.
        local_shape: shape of the shard. Elements beyond the global shape are padding and get zero.
        dtype: of the result. Numbers are computed in float64 and rounded once.
        device: of the result.
    """

    key: Key
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def fan_in(self) -> int:
        """Number of inputs of one output, for weights laid out [..., out, in] as ``torch.nn.functional.linear`` has
        them: the last dim of the global shape."""
        return self.shape[-1] if self.shape else 1

    def normal(self, std: float = 1.0, mean: float = 0.0, stream: int = 0) -> Tensor:
        """``mean + std * standard normal``, of ``local_shape``; streams are independent of each other."""
        return self._fill(lambda key, index: random.normal(key, index).mul_(std).add_(mean), "normal", stream)

    def uniform(self, low: float = 0.0, high: float = 1.0, stream: int = 0) -> Tensor:
        """Uniform in [low, high), of ``local_shape``; streams are independent of each other."""
        return self._fill(lambda key, index: random.uniform(key, index).mul_(high - low).add_(low), "uniform", stream)

    def constant(self, value: float) -> Tensor:
        """``value`` everywhere but in the padding, of ``local_shape``."""
        out = torch.zeros(self.local_shape, dtype=self.dtype, device=self.device)
        out[self._valid_window()] = value
        return out

    def _fill(self, function: Callable[[Key, Tensor], Tensor], kind: str, stream: int) -> Tensor:
        key = self.key.fold(kind).fold(stream)
        valid = self._valid_shape()
        whole = torch.empty(valid, dtype=self.dtype, device=self.device)
        if whole.device.type != "meta":
            flat = whole.view(-1)
            for start, index in _indices(self.shape, self.starts, valid, whole.device):
                flat[start : start + index.numel()] = function(key, index)
        if valid == self.local_shape:
            return whole
        out = torch.zeros(self.local_shape, dtype=self.dtype, device=self.device)
        out[self._valid_window()] = whole
        return out

    def _valid_shape(self) -> tuple[int, ...]:
        dims = zip(self.shape, self.starts, self.local_shape, strict=True)
        return tuple(max(0, min(size - start, local)) for size, start, local in dims)

    def _valid_window(self) -> tuple[slice, ...]:
        return tuple(slice(0, n) for n in self._valid_shape())


Init = Callable[[Draw], Tensor]
"""An initialiser: returns ``draw.local_shape`` values of ``draw.dtype`` on ``draw.device``."""


@dataclass(frozen=True)
class Normal:
    """See ``normal``."""

    std: float
    mean: float = 0.0

    def __call__(self, draw: Draw) -> Tensor:
        return draw.normal(self.std, self.mean)


@dataclass(frozen=True)
class Uniform:
    """See ``uniform``."""

    low: float
    high: float

    def __call__(self, draw: Draw) -> Tensor:
        return draw.uniform(self.low, self.high)


@dataclass(frozen=True)
class Constant:
    """See ``constant``."""

    value: float

    def __call__(self, draw: Draw) -> Tensor:
        return draw.constant(self.value)


def normal(std: float = 0.02, mean: float = 0.0) -> Normal:
    """Normal values.

    >>> normal(0.02) == normal(0.02), normal(0.02)
    (True, Normal(std=0.02, mean=0.0))
    """
    if not (math.isfinite(std) and std >= 0 and math.isfinite(mean)):
        raise ModelError(f"init.normal(std={std}, mean={mean}): both are finite, and std is at least 0.")
    return Normal(std, mean)


def uniform(low: float, high: float) -> Uniform:
    """Values uniform in [low, high)."""
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ModelError(f"init.uniform(low={low}, high={high}): both are finite, and low is at most high.")
    return Uniform(low, high)


def constant(value: float) -> Constant:
    """The same value everywhere."""
    return Constant(value)


def zeros() -> Constant:
    """Zero everywhere."""
    return Constant(0.0)


def ones() -> Constant:
    """One everywhere."""
    return Constant(1.0)


def materialize(
    init: Init,
    key: Key,
    shape: tuple[int, ...],
    starts: tuple[int, ...] | None = None,
    local_shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The values of one shard, of ``local_shape`` (default: the whole), as ``init`` makes them.

    >>> whole = materialize(normal(1.0), random.key(0).fold("w"), (4, 6))
    >>> shard = materialize(normal(1.0), random.key(0).fold("w"), (4, 6), starts=(0, 3), local_shape=(4, 3))
    >>> torch.equal(shard, whole[:, 3:])
    True

    Raises:
        ModelError: if ``init`` returns another shape, dtype or device than it was asked for.
    """
    starts = starts if starts is not None else (0,) * len(shape)
    local_shape = tuple(local_shape if local_shape is not None else shape)
    draw = Draw(key, tuple(shape), tuple(starts), local_shape, dtype, torch.device(device))
    value = init(draw)
    if tuple(value.shape) != local_shape or value.dtype != dtype or value.device.type != draw.device.type:
        raise ModelError(
            f"initialiser {init} returned {tuple(value.shape)} {value.dtype} on {value.device}, where {local_shape} "
            f"{dtype} on {device} was asked for; use draw.local_shape, draw.dtype and draw.device."
        )
    return value


def _indices(
    shape: tuple[int, ...], starts: tuple[int, ...], window: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, Tensor]]:
    """Chunks of the window's elements in row-major order: ``(first local index, global indices [n])``."""
    dims = _merge(shape, starts, window)
    total = math.prod(window)
    for begin in range(0, total, _CHUNK):
        local = torch.arange(begin, min(begin + _CHUNK, total), device=device)
        index = torch.zeros_like(local)
        stride = 1
        for size, start, length in reversed(dims[1:]):
            above = local // length
            index += (local - above * length + start) * stride
            local, stride = above, stride * size
        index += (local + dims[0][1]) * stride
        yield begin, index


def _merge(shape: tuple[int, ...], starts: tuple[int, ...], window: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """``(size, start, length)`` of each dim, where a dim taken whole is merged into the one before it."""
    dims = [(1, 0, 1)]
    for size, start, length in zip(shape, starts, window, strict=True):
        if length == size:
            before = dims.pop()
            dims.append((before[0] * size, before[1] * size, before[2] * size))
        else:
            dims.append((size, start, length))
    return dims
