"""Weights that kernels capture instead of differentiating them: their gradients are kept as data, an input and a cotangent, and
added straight into the memory where they accumulate, at once or later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_par.kernel import Kernel


class Accumulator(Protocol):
    """Where the gradients of a step add up."""

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Add the gradients of one layer for one microbatch."""

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        """The contiguous memory of a leaf's gradient, to which the caller adds now; True if it holds nothing yet, and is to be
        overwritten."""

    def done(self, paths: Sequence[str]) -> None:
        """One layer has added all that one microbatch gives to these leaves."""


class Pair(Protocol):
    """A weight gradient that is yet to be computed, kept as data."""

    def add_to(self, gradients: Accumulator) -> None:
        """Compute it and add it."""


@dataclass(frozen=True, eq=False)
class Product:
    """``cotangent.T @ x``, the gradient of a weight [*out, *in]; x is [rows, in] and the cotangent [rows, out]."""

    path: str
    x: Tensor
    cotangent: Tensor

    def add_to(self, gradients: Accumulator) -> None:
        buffer, first = gradients.buffer(self.path)
        buffer = buffer.view(self.cotangent.shape[1], self.x.shape[1])
        ct, x = self.cotangent, self.x
        if ct.dtype != buffer.dtype and buffer.device.type == "cpu":
            ct, x = ct.to(buffer.dtype), x.to(buffer.dtype)  # a product in bfloat16 is several times slower there
        if ct.dtype == buffer.dtype:
            buffer.addmm_(ct.t(), x, beta=0 if first else 1)  # beta=0 ignores what is there, be it not a number
        elif first:
            buffer.copy_(ct.t() @ x)
        else:
            buffer.add_(ct.t() @ x)


@dataclass(frozen=True, eq=False)
class Total:
    """The sum of the rows of a cotangent [rows, out], the gradient of a bias [*out]."""

    path: str
    cotangent: Tensor

    def add_to(self, gradients: Accumulator) -> None:
        buffer, first = gradients.buffer(self.path)
        flat = buffer.view(-1)
        if first:
            torch.sum(self.cotangent, 0, dtype=flat.dtype, out=flat)
        else:
            flat.add_(self.cotangent.sum(0, dtype=flat.dtype))


@dataclass(frozen=True, eq=False)
class Rows:
    """A cotangent [n, embed] of the rows ``ids`` [n] of a table [vocab, embed]."""

    path: str
    ids: Tensor
    cotangent: Tensor

    def add_to(self, gradients: Accumulator) -> None:
        buffer, first = gradients.buffer(self.path)
        if first:
            buffer.zero_()
        ct = self.cotangent.to(buffer.dtype)
        if buffer.device.type == "cpu":
            buffer.index_add_(0, self.ids, ct)
        else:  # there `index_add_` adds in any order, and this sorts first
            buffer.index_put_((self.ids,), ct, accumulate=True)


@dataclass(frozen=True, eq=False)
class Ready:
    """A gradient that is already known, and waits for its turn."""

    path: str
    gradient: Tensor

    def add_to(self, gradients: Accumulator) -> None:
        gradients.add({self.path: self.gradient})


@dataclass(frozen=True, eq=False)
class Complete:
    """Marks the end of what one layer adds for one microbatch."""

    paths: Sequence[str]

    def add_to(self, gradients: Accumulator) -> None:
        gradients.done(self.paths)


class Leaf(NamedTuple):
    """A tensor that a kernel does not differentiate.

    Attributes:
        path: the leaf of the model that it is, None for a constant.
        raw: the plain tensor.
        given: the tensor as the layer has it, for derivatives of the backward.
    """

    path: str | None
    raw: Tensor
    given: Tensor


class Capture:
    """What the kernels of one running layer capture, and where the gradients of that go.

    A kernel captures a weight if it is, by identity, a leaf that the layer was given, and if it runs where the layer's own
    derivative is recorded: not in a transform of torch.func that the layer applies, nor without derivatives. Anything else is
    differentiated as usual.
    """

    def __init__(self, raw: Mapping[str, Tensor]) -> None:
        """``raw``: the trainable leaves of the layer, as plain tensors."""
        self.raw = raw
        self.uses: Counter[str] = Counter()
        self.ordinary: dict[str, Tensor] = {}
        self.token: Tensor | None = None
        self._given: dict[int, tuple[str, Tensor]] = {}
        self._depth, self._forward = -1, False
        self._sink: tuple[Accumulator, list[Pair] | None] | None = None

    @contextmanager
    def forward(self, given: Mapping[str, Tensor], token: Tensor | None) -> Iterator[None]:
        """While the layer runs.

        Args:
            given: the trainable leaves as the layer gets them.
            token: a number that is differentiated, for kernels that have no other input that is.
        """
        self._given = {id(leaf): (path, leaf) for path, leaf in given.items()}  # alive, so no other has the id
        self.token, self._depth, self._forward = token, _depth(), True
        try:
            yield
        finally:
            self._forward = False

    @contextmanager
    def backward(self, gradients: Accumulator, later: list[Pair] | None) -> Iterator[None]:
        """While the layer's pullback runs. A backward at any other time is one of the layer's own, and gives nothing."""
        self._sink = gradients, later
        try:
            yield
        finally:
            self._sink = None
            self._given = {}

    def leaves(self, tensors: Sequence[Tensor | None]) -> tuple[Leaf | None, ...] | None:
        """What is captured of the weights and biases of a kernel; None if it has to differentiate one of them."""
        if not torch.is_grad_enabled() or _depth() != self._depth:
            return None
        found = [None if x is None else self._leaf(x) for x in tensors]
        if any(leaf is None and x is not None for leaf, x in zip(found, tensors, strict=True)):
            return None
        paths = [leaf.path for leaf in found if leaf is not None and leaf.path is not None]
        if self._forward:  # and not when a checkpoint runs it again
            self.uses.update(paths)
        return tuple(found) if paths else None

    def _leaf(self, x: Tensor) -> Leaf | None:
        path, leaf = self._given.get(id(x), ("", None))
        if leaf is x:
            return Leaf(path, self.raw[path], x)
        return None if x.requires_grad else Leaf(None, x, x)

    def give(self, pair: Pair) -> None:
        """A gradient of a captured leaf."""
        if self._sink is None:
            return
        gradients, later = self._sink
        if later is None:
            pair.add_to(gradients)
        else:
            later.append(pair)

    def watched(self, token: Tensor) -> dict[str, Tensor]:
        """The leaves to give to the layer, whose cotangents, all uses together, come into ``ordinary``. Nothing comes for one
        that is not differentiated, and no zeros are made for it."""
        leaves = _Leaves.apply(token, _Watched(self.raw, self.ordinary))
        return dict(zip(self.raw, leaves, strict=True))


@dataclass(frozen=True, eq=False)
class _Watched:
    """Leaves, and where what arrives at them is put; a dict alone would be copied by torch."""

    leaves: Mapping[str, Tensor]
    found: dict[str, Tensor]


class _Leaves(Kernel):
    """Constants, recorded for the sake of the token."""

    @staticmethod
    def forward(token: Tensor, watched: _Watched) -> tuple[Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in watched.leaves.values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.watched = inputs
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        arrived = zip(ctx.watched.leaves, cotangents, strict=True)
        ctx.watched.found.update((path, ct.detach()) for path, ct in arrived if ct is not None)
        return None, None


def _depth() -> int:
    """How many transforms of torch.func run around here."""
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return 0 if interpreter is None else int(interpreter.level())
