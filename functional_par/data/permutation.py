"""A random order of ``n`` things that can be asked for any place, without a table."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_par import random
from functional_par.random import Key

_ROUNDS = 6


def permute(key: Key, index: Tensor, n: int) -> Tensor:
    """Where each of ``index`` (int64, in [0, n)) stands in the order of ``key``: a bijection of [0, n).

    A Feistel network permutes the next power of two; what falls outside [0, n) goes through it again until it does
    not (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").

    >>> sorted(permute(random.key(0), torch.arange(5), 5).tolist())
    [0, 1, 2, 3, 4]
    """
    bits = max(2, (n - 1).bit_length())
    rounds = [key.fold(i) for i in range(_ROUNDS)]
    out = _feistel(rounds, index, bits)
    while (outside := out >= n).any():
        out[outside] = _feistel(rounds, out[outside], bits)
    return out


def _feistel(rounds: list[Key], x: Tensor, bits: int) -> Tensor:
    """Each round mixes one half into the other, in turn, so the halves need not be equally wide."""
    width, other = bits // 2, bits - bits // 2
    left, right = x >> other, x & ((1 << other) - 1)
    for key in rounds:
        left, right = right, left ^ (random.bits(key, right) & ((1 << width) - 1))
        width, other = other, width
    return (left << other) | right


def shuffled(seed: int, sample: Tensor, n: int) -> Tensor:
    """Which of ``n`` windows each global sample (int64, from 0 without end) reads: every window once an epoch, in an
    order of the epoch's own."""
    order = random.key(seed).fold("data")
    out = torch.empty_like(sample)
    epoch = sample // n
    for number in epoch.unique().tolist():
        here = epoch == number
        out[here] = permute(order.fold(number), sample[here] % n, n)
    return out
