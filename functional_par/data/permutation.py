"""A random order of ``n`` things that can be asked for any place, without a table."""

from __future__ import annotations

from functional_par import random
from functional_par.random import Key

_ROUNDS = 6


def permute(key: Key, index: int, n: int) -> int:
    """Where ``index``, in [0, n), stands in the order of ``key``: a bijection of [0, n).

    A Feistel network permutes the next power of two; what falls outside [0, n) goes through it again until it does
    not (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): twice at most on average.

    >>> sorted(permute(random.key(0), i, 5) for i in range(5))
    [0, 1, 2, 3, 4]
    """
    bits = max(2, (n - 1).bit_length())
    index = _feistel(key, index, bits)
    while index >= n:
        index = _feistel(key, index, bits)
    return index


def _feistel(key: Key, x: int, bits: int) -> int:
    """Each round mixes one half into the other, in turn, so the halves need not be equally wide."""
    width, other = bits // 2, bits - bits // 2
    left, right = x >> other, x & ((1 << other) - 1)
    for i in range(_ROUNDS):
        left, right = right, left ^ (random.bits_at(key, right * _ROUNDS + i) & ((1 << width) - 1))
        width, other = other, width
    return (left << other) | right


def shuffled(seed: int, samples: range, n: int) -> list[int]:
    """Which of ``n`` windows each global sample (from 0 without end) reads: every window once an epoch, in an order of
    the epoch's own."""
    order = random.key(seed).fold("data")
    if not samples:
        return []
    keys = {epoch: order.fold(epoch) for epoch in range(samples[0] // n, samples[-1] // n + 1)}
    return [permute(keys[sample // n], sample % n, n) for sample in samples]
