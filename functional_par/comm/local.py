"""What each operation means, as a function of all ranks' inputs: plain torch, for ranks that share memory.

Sums run in group order, so every rank computes the same bits. No result aliases an input.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from functional_par.comm.base import AllGather, AllReduce, AllToAll, Op, ReduceScatter

CHUNK = 1 << 17
"""Elements that one rank reduces at a time: small enough to stay in its cache, large enough to be worth the call."""


def outcome(op: Op, inputs: Sequence[Tensor], index: int) -> Tensor:
    """The result of ``op`` on rank ``index`` of the group, from the inputs of all of its ranks.

    >>> outcome(AllToAll(split=0, concat=0), [torch.tensor([1, 2]), torch.tensor([3, 4])], index=1)
    tensor([2, 4])
    """
    if isinstance(op, AllReduce):
        return combine(op, inputs)
    if isinstance(op, AllGather):
        return torch.cat(list(inputs), op.dim)
    if isinstance(op, ReduceScatter):
        return combine(AllReduce(), [_chunk(x, op.dim, index, len(inputs)) for x in inputs])
    if isinstance(op, AllToAll):
        return torch.cat([_chunk(x, op.split, index, len(inputs)) for x in inputs], op.concat)
    return inputs[op.to.index(index)].clone()


def combine(op: AllReduce, inputs: Sequence[Tensor]) -> Tensor:
    """Sum or maximum of two or more inputs, in their order."""
    return reduce(torch.maximum if op.op == "max" else torch.add, inputs)


def _chunk(x: Tensor, dim: int, index: int, count: int) -> Tensor:
    length = x.shape[dim] // count
    return x.narrow(dim, index * length, length)


class SharedReduction:
    """One large all-reduce that its ranks carry out together, chunk by chunk, each chunk by whoever comes first.

    Nobody waits for a rank that has not claimed a chunk, so ranks may wait for several of these in any order. Each
    chunk is written to every rank's output while it is in cache; an output may be the input of its rank.
    """

    def __init__(self, op: AllReduce, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._combine = torch.maximum if op.op == "max" else torch.add
        self._inputs = [x.view(-1) for x in inputs]
        self._outputs = [x.view(-1) for x in outputs]
        self._chunks = -(-self._inputs[0].numel() // CHUNK)
        self._claims = itertools.count()
        self._done, self._lock = 0, threading.Lock()

    def work(self) -> bool:
        """Reduce chunks until none is left; True for the one caller that completes the last of them."""
        count = 0
        while (claim := next(self._claims)) < self._chunks:
            self._reduce(claim * CHUNK, min((claim + 1) * CHUNK, self._inputs[0].numel()))
            count += 1
        with self._lock:
            self._done += count
            return count > 0 and self._done == self._chunks

    def _reduce(self, start: int, stop: int) -> None:
        first, *rest = (x[start:stop] for x in self._inputs)
        total, *copies = (x[start:stop] for x in self._outputs)
        for x in rest:
            first = self._combine(first, x, out=total)
        for copy in copies:
            copy.copy_(total)
