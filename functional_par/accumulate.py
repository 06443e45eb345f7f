"""Where the gradients of one bucket add up in a step, and how their sum over ranks is on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from functional_par.bucket import Bucket
from functional_par.comm.base import AllReduce, Handle, ReduceScatter, World
from functional_par.comm.solo import Done


@dataclass(frozen=True)
class Memory:
    """What gradients are kept in.

    Attributes:
        dtype: in which they add up.
        device: where.
        poison: memory is NaN before it is written.
        reduce: dtype in which they travel; None is that of the sum.
    """

    dtype: torch.dtype
    device: torch.device
    poison: bool = False
    reduce: torch.dtype | None = None

    def zeros(self, bucket: Bucket) -> Tensor:
        """A flat buffer."""
        return torch.zeros(bucket.elements, dtype=self.dtype, device=self.device)


Finish = Callable[[str, Tensor], None]
"""Forgets in place what a leaf's gradient has in the padding of its shard."""


class Account(ABC):
    """The gradients of one bucket."""

    def __init__(self, bucket: Bucket, memory: Memory, finish: Finish) -> None:
        self.bucket, self.memory, self.finish = bucket, memory, finish

    @abstractmethod
    def buffer(self, path: str) -> tuple[Tensor, bool]:
        """The memory of a leaf's gradient, [*shard], to which the caller adds now; True if it is the first, to overwrite."""

    def add(self, path: str, grad: Tensor) -> None:
        """Add to a leaf's gradient."""
        buffer, first = self.buffer(path)
        if first:
            buffer.copy_(grad)
        else:
            buffer.add_(grad)

    @abstractmethod
    def total(self, world: World) -> Tensor:
        """The sum over the ranks of the bucket [elements], or this rank's part of it [part]."""

    def _send(self, world: World, flat: Tensor) -> Handle:
        """Start the sum of a flat buffer, which nobody touches from then on."""
        bucket = self.bucket
        if len(bucket.ranks) == 1:
            return Done(flat)
        op = ReduceScatter(0) if bucket.sliced else AllReduce()
        wire = flat if self.memory.reduce is None else flat.to(self.memory.reduce)
        return world.subgroup(bucket.ranks, bucket.label).start(op, wire, donate=True)

    def _arrived(self, handle: Handle) -> Tensor:
        return handle.wait().to(self.memory.dtype)


class Whole(Account):
    """Whole shards, summed once a step. Their memory may be used in every step.

    Attributes:
        leaves: path to gradient, as views of one buffer.
    """

    def __init__(self, bucket: Bucket, memory: Memory, finish: Finish) -> None:
        super().__init__(bucket, memory, finish)
        self._flat = memory.zeros(bucket)
        self.leaves = shards(bucket, self._flat)
        self.begin(0)

    def begin(self, expected: int) -> None:
        """Forget the step before. The sum may start after so many calls of ``done``; 0 leaves that to ``total``."""
        self._unwritten = set(self.leaves)
        self._left, self._closed = expected, False
        self._handle: Handle | None = None
        if self.memory.poison:
            self._flat.fill_(torch.nan)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        first = path in self._unwritten
        self._unwritten.discard(path)
        return self.leaves[path], first

    def done(self, world: World, contributions: int) -> None:
        """So many of the expected contributions are in; after the last the sum starts."""
        self._left -= contributions
        if self._left == 0:
            self.close()
            self.start(world)

    def close(self) -> None:
        """Zero where no gradient came, and where it flowed into the padding of an uneven shard (the transpose of padding with
        zeros forgets it). Done once."""
        if self._closed:
            return
        self._closed = True
        for path, leaf in self.leaves.items():
            if path in self._unwritten:
                leaf.zero_()
            self.finish(path, leaf)

    def start(self, world: World) -> None:
        """Send the sum on its way, unless it is."""
        if self._handle is None:
            self._handle = self._send(world, self._flat)

    def total(self, world: World) -> Tensor:
        self.start(world)
        assert self._handle is not None
        total = self._arrived(self._handle)
        if not self.bucket.sliced and total is not self._flat:
            self._flat, self.leaves = total, shards(self.bucket, total)
        return total


class Passing(Account):
    """What one layer adds for one microbatch is there for a moment; this rank's part of its sum over the ranks is kept.

    The gradients that are there before the others, where those of weights come later, wait in copies: the whole buffer is
    made for the last moment.
    """

    def __init__(self, bucket: Bucket, memory: Memory, finish: Finish) -> None:
        super().__init__(bucket, memory, finish)
        self.begin(0)

    def begin(self, expected: int) -> None:
        """Forget the step before."""
        self._leaves: dict[str, Tensor] = {}
        self._unwritten: set[str] = set()
        self._early: list[tuple[str, Tensor]] = []
        self._flat: Tensor | None = None
        self._handle: Handle | None = None
        self._total: Tensor | None = None

    def add(self, path: str, grad: Tensor) -> None:
        if self._flat is None:
            self._early.append((path, grad.to(self.memory.dtype, copy=True)))
        else:
            super().add(path, grad)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        self._here()
        first = path in self._unwritten
        self._unwritten.discard(path)
        return self._leaves[path], first

    def done(self, world: World) -> None:
        """Send what is here on its way."""
        self.settle()
        flat = self._here()
        for path, leaf in self._leaves.items():
            self.finish(path, leaf)
        self._flat, self._leaves = None, {}
        self._handle = self._send(world, flat)

    def settle(self) -> None:
        """Add the sum that is under way to the total."""
        if self._handle is None:
            return
        part, self._handle = self._arrived(self._handle), None
        self._total = part if self._total is None else self._total.add_(part)

    def total(self, world: World) -> Tensor:
        if self._flat is not None or self._early:
            self.done(world)
        self.settle()
        if self._total is None:
            self._total = torch.zeros(self.bucket.part, dtype=self.memory.dtype, device=self.memory.device)
        return self._total

    def _here(self) -> Tensor:
        if self._flat is None:
            self._flat = self.memory.zeros(self.bucket)
            self._leaves = shards(self.bucket, self._flat)
            self._unwritten = set(self._leaves)
            early, self._early = self._early, []
            for path, grad in early:
                super().add(path, grad)
        return self._flat


def shards(bucket: Bucket, flat: Tensor) -> dict[str, Tensor]:
    """The leaves of a flat buffer [elements], as views [*shard]."""
    return {path: flat[start : start + prod(shape)].view(shape) for path, shape, start in bucket.places()}


def pieces(bucket: Bucket, index: int, part: Tensor) -> dict[str, Tensor]:
    """The slices of the leaves in a part [part] of the flat buffer with that index, as views [elements]."""
    return {path: part[at : at + piece.elements] for path, piece, at in bucket.slices(index)}
