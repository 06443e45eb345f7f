"""Layer functions on tp ranks that are threads: how their inputs are cut, and how outputs and gradients are put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from functional_par.mesh import Mesh
from functional_par.par import TensorParallelMode
from functional_par.run import run
from functional_par.run_par import RunPar
from functional_par.vjp import engine

AR, RS = TensorParallelMode.ALL_REDUCE, TensorParallelMode.REDUCE_SCATTER

every_mode = pytest.mark.parametrize("mode", [AR, RS], ids=["ar", "rs"])


@dataclass(frozen=True)
class Split:
    """Cut along a dim in equal chunks, the last ones padded with zeros."""

    dim: int

    def put(self, x: Tensor, rank: int, tp: int) -> Tensor:
        dim = self.dim % x.ndim
        length = -(-x.shape[dim] // tp)
        pad = [0, 0] * (x.ndim - dim - 1) + [0, length * tp - x.shape[dim]]
        return F.pad(x, pad).narrow(dim, rank * length, length).clone()

    def collect(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        whole = torch.cat(list(parts), self.dim)
        padding = whole.narrow(self.dim, like.shape[self.dim], whole.shape[self.dim] - like.shape[self.dim])
        assert not padding.any(), "a gradient flowed into the padding"
        return whole.narrow(self.dim, 0, like.shape[self.dim])


@dataclass(frozen=True)
class Same:
    """The same on every rank, and so is its cotangent."""

    def put(self, x: Tensor, rank: int, tp: int) -> Tensor:
        return x.clone()

    def collect(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        for part in parts:
            close(part, parts[0])
        return parts[0]


@dataclass(frozen=True)
class Owing(Same):
    """A parameter that is the same on every rank, whose gradient is a partial sum."""

    def collect(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        return torch.stack(list(parts)).sum(0)


Placement = Split | Same


def stream(mode: TensorParallelMode) -> Placement:
    """How the stream lies, with the sequence in dim 1."""
    return Same() if mode is AR else Split(1)


def shared(mode: TensorParallelMode) -> Placement:
    """How a replicated parameter that meets the stream lies."""
    return Same() if mode is AR else Owing()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """max|a-b| <= 1e-10 max(1, max|b|)"""
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=tolerance * scale)


def on_ranks(
    tp: int, main: Callable[..., Any], mode: Any = AR, *, async_comm: bool = False, fast: bool = True, batch: Any = None
) -> list[Any]:
    """``main(par, rank)`` of every rank; ``calls(par)`` counts what the rank communicated."""

    def rank_main(world: Any) -> Any:
        groups = {("tp",): world.group("tp")} if tp > 1 else {}
        par = RunPar(groups, mode, async_comm, batch or {}, fast=fast)
        object.__setattr__(par, "record", world.record)
        return main(par, world.rank)

    return run(rank_main, Mesh(tp=tp), backend="threads", timeout=30.0)


def calls(par: Any) -> dict[str, int]:
    """Number of calls by kind so far; forgets them."""
    counts: Counter[str] = Counter()
    for (_, _, kind), n in par.record.calls.items():
        counts[kind] += n
    par.record.clear()
    return dict(counts)


def tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """Random normal tensors in float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def vjp(function: Callable[..., Any], primals: Sequence[Tensor], cotangents: Any, name: str = "func") -> Any:
    """Outputs and input gradients; ``cotangents`` is a function of the outputs."""

    def listed(*primals: Tensor) -> Any:
        out = function(*primals)
        return [out] if isinstance(out, Tensor) else list(out), []

    outputs, _, pull = engine(name)(listed, *primals)
    return outputs, pull(cotangents(outputs))
