"""What happens once between ranks that are threads: a collective is a meeting, a tensor sent is a message.

Both hold references to the ranks' tensors until the last of them has its result, which aliases no other rank's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_par.comm import local
from functional_par.comm.base import AllReduce, Op
from functional_par.comm.checks import typed
from functional_par.comm.hub import Gate, Hub
from functional_par.errors import MismatchError


class Meeting:
    """One collective of a group: all ranks bring an input, then each takes its result.

    The ranks synchronise once, on arrival. Small all-reduces are computed by whoever arrives last; large ones by all
    who take, together.
    """

    def __init__(self, hub: Hub, ranks: tuple[int, ...]) -> None:
        self.visits = 0
        self._hub, self._ranks = hub, ranks
        self._first: tuple[int, Op, Tensor, str] | None = None
        self._arrived = Gate(ranks)
        self._inputs: list[Any] = [None] * len(ranks)
        self._outputs: list[Any] = [None] * len(ranks)
        self._shared: local.SharedReduction | None = None
        self._reduced: Gate | None = None

    def bring(self, index: int, x: Tensor, op: Op, donate: bool, call: str) -> None:
        """Deposit the input of the group's rank ``index``; raises MismatchError if it does not fit the others'."""
        large = x.numel() > local.CHUNK and isinstance(op, AllReduce)
        if large:
            x = x.contiguous()
            self._outputs[index] = x if donate else torch.empty_like(x)
        with self._hub.lock:
            self._check(index, x, op, call)
            self._inputs[index] = x
            self._arrived.missing.discard(self._ranks[index])
            last = not self._arrived.missing
        if last:
            if isinstance(op, AllReduce):
                self._reduce(op, large)
            self._hub.open(self._arrived)

    def take(self, rank: int, index: int, what: object) -> Tensor:
        """The result of the group's rank ``index``, once all inputs are there."""
        self._hub.wait(rank, self._arrived, what)
        assert self._first is not None
        op = self._first[1]
        if self._shared is not None and self._reduced is not None:
            if self._shared.work():
                self._hub.open(self._reduced)
            self._hub.wait(rank, self._reduced, what)
        return self._outputs[index] if isinstance(op, AllReduce) else local.outcome(op, self._inputs, index)

    def _reduce(self, op: AllReduce, large: bool) -> None:
        if large:
            self._shared, self._reduced = local.SharedReduction(op, self._inputs, self._outputs), Gate()
        else:
            total = local.combine(op, self._inputs)
            self._outputs = [total, *(total.clone() for _ in self._ranks[1:])]

    def _check(self, index: int, x: Tensor, op: Op, call: str) -> None:
        if self._first is None:
            self._first = index, op, x, call
        other, first_op, there, first_call = self._first
        if (op, x.dtype, x.shape) != (first_op, there.dtype, there.shape):
            raise MismatchError(
                f"rank {self._ranks[other]} entered {first_call} ({first_op}), but rank {self._ranks[index]} entered "
                f"{call} ({op}). All ranks of a group call the same collectives on the same shapes in the same order."
            )


class Message:
    """One tensor on its way from a rank to another."""

    def __init__(self, hub: Hub, source: int, to: int) -> None:
        self.visits = 0
        self._hub, self._source, self._to = hub, source, to
        self._sent = Gate((source,))
        self._x: Any = None
        self._expected: tuple[tuple[int, ...], torch.dtype] | None = None
        self._out: Tensor | None = None

    def offer(self, x: Tensor) -> None:
        """The sender's part; raises MismatchError if the receiver expects something else."""
        with self._hub.lock:
            self._x = x
            self._sent.missing.clear()
            self._check()
        self._hub.open(self._sent)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None = None) -> None:
        """The receiver's part; raises MismatchError if something else was sent."""
        with self._hub.lock:
            self._expected, self._out = (shape, dtype), out
            self._check()

    def take(self, rank: int, index: int, what: object) -> Tensor:
        """A copy of what was sent, once it is there."""
        self._hub.wait(rank, self._sent, what)
        return self._x.clone() if self._out is None else self._out.copy_(self._x)

    def _check(self) -> None:
        if self._x is None or self._expected is None:
            return
        sent, expected = (tuple(self._x.shape), self._x.dtype), self._expected
        if sent != expected:
            raise MismatchError(
                f"rank {self._source} sent {typed(*sent)} to rank {self._to}, which expects {typed(*expected)}. "
                f"Shapes are static: both ends derive them from the plan."
            )
