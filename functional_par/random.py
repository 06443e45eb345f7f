"""Random numbers as a pure function of ``(key, index)``: no generator, no state, never torch's global one.

Only wrapping integer arithmetic and correctly rounded float64 operations (add, multiply, divide, square root) are
used, so a number depends on neither device, instruction set, chunk nor the rank that asks for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 15
"""Elements worked on at once on CPU, so that temporaries stay in the cache."""

_LARGE_CHUNK = 1 << 24
"""The same elsewhere, where starting an operation costs more than a cache saves."""


@dataclass(frozen=True)
class Key:
    """128 bits that name one stream of random numbers; ``fold`` derives the key of a part.

    >>> leaf = key(0).fold("blocks.0.weight")
    >>> leaf == key(0).fold("blocks.0.weight"), leaf == key(1).fold("blocks.0.weight")
    (True, False)
    >>> leaf.fold(3) == leaf.fold("3")
    False
    """

    low: int
    high: int

    def fold(self, data: int | str) -> Key:
        """The key of the part that ``data`` names; integers and strings never collide."""
        kind = "s" if isinstance(data, str) else "i"
        return _digest(f"{self.low}:{self.high}:{kind}:{data}")


def key(seed: int) -> Key:
    """The root key of a seed, which is any integer."""
    return _digest(f"seed:{int(seed)}")


def bits(key: Key, index: Tensor) -> Tensor:
    """64 random bits for each element of an int64 ``index``, as int64, of the same shape.

    Splitmix64 (Steele, Lea, Flood 2014) as a function of a counter, with half of the key added between its rounds.

    >>> bits(key(0), torch.tensor([7, 8])).tolist() == [bits(key(0), torch.tensor(i)).item() for i in (7, 8)]
    True
    """
    return _chunked(lambda i: _mix(key, i.clone()), index, torch.int64)


def bits_at(key: Key, index: int) -> int:
    """The same 64 bits for one index, in plain Python: for a few numbers this costs less than a tensor does.

    >>> bits_at(key(0), 7) == bits(key(0), torch.tensor(7)).item()
    True
    """
    x = (index * _GAMMA + key.low) & _WORD
    x = ((x ^ (x >> 30)) * _FIRST + key.high) & _WORD
    x = ((x ^ (x >> 27)) * _SECOND) & _WORD
    return _signed(x ^ (x >> 31))


def uniform(key: Key, index: Tensor) -> Tensor:
    """Uniform float64 in [0, 1), multiples of 2**-53, for each element of an int64 ``index``."""
    return _chunked(lambda i: _unit(_mix(key, i.clone())).mul_(2.0**-53), index, torch.float64)


def normal(key: Key, index: Tensor) -> Tensor:
    """Standard normal float64 for each element of an int64 ``index``, by the transform of Box and Muller (1958).

    One number an index: the sine of an angle uniform in a half circle is distributed as the cosine of one uniform in
    the circle, and needs no argument reduction.
    """
    radius, angle = key.fold("radius"), key.fold("angle")

    def draw(index: Tensor) -> Tensor:
        r = _log(_unit(_mix(radius, index.clone())).add_(1).mul_(2.0**-53)).mul_(-2).sqrt_()
        turn = _unit(_mix(angle, index.clone())).mul_(2.0**-53).sub_(0.5)
        return r.mul_(_sin(turn.mul_(math.pi)))

    return _chunked(draw, index, torch.float64)


def _digest(text: str) -> Key:
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"functional_par").digest()
    low, high = (int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8))
    return Key(low, high)


def _chunked(function: Callable[[Tensor], Tensor], index: Tensor, dtype: torch.dtype) -> Tensor:
    if index.dtype != torch.int64:
        raise TypeError(f"an index of random numbers is an int64 tensor, not {index.dtype}.")
    out = torch.empty(index.shape, dtype=dtype, device=index.device)
    flat, source = out.view(-1), index.reshape(-1)
    chunk = _CHUNK if index.device.type == "cpu" else _LARGE_CHUNK
    for start in range(0, flat.numel(), chunk):
        flat[start : start + chunk] = function(source[start : start + chunk])
    return out


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_WORD = (1 << 64) - 1
_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(key: Key, x: Tensor) -> Tensor:
    x.mul_(_GAMMA).add_(key.low)
    x.bitwise_xor_(_shift(x, 30)).mul_(_FIRST).add_(key.high)
    x.bitwise_xor_(_shift(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift(x, 31))


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _unit(x: Tensor) -> Tensor:
    """The upper 53 bits as float64, an integer in [0, 2**53)."""
    return _shift(x, 11).to(torch.float64)


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64: the exponent, and the series of atanh for the mantissa."""
    offset = _BITS_OF_ONE - _BITS_OF_SQRT_HALF
    raw = x.view(torch.int64) + offset
    exponent = (raw >> 52).sub_(1023)
    mantissa = raw.bitwise_and_((1 << 52) - 1).add_(_BITS_OF_SQRT_HALF).view(torch.float64)  # in [sqrt(1/2), sqrt(2))
    s = (mantissa - 1).div_(mantissa.add_(1))
    series = _horner(s * s, [1 / (2 * n + 1) for n in range(11)])
    return series.mul_(s).mul_(2).add_(exponent.to(torch.float64).mul_(math.log(2)))


def _sin(x: Tensor) -> Tensor:
    """Sine of float64 in [-pi/2, pi/2], by Taylor's series."""
    return _horner(x * x, [(-1) ** n / math.factorial(2 * n + 1) for n in range(11)]).mul_(x)


def _horner(x: Tensor, coefficients: list[float]) -> Tensor:
    """Polynomial in ``x``, constant term first. Two roundings a term: not every device has a fused multiply-add."""
    out = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out.mul_(x).add_(c)
    return out


_BITS_OF_ONE = 0x3FF0000000000000
_BITS_OF_SQRT_HALF = 0x3FE6A09E667F3BCD
