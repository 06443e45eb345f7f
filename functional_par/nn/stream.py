"""How the stream of activations lies between tensor-parallel layers, and how layers enter and leave it.

In ALL_REDUCE the stream is whole on every rank; in REDUCE_SCATTER each rank holds its own window of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_par.comm import collectives
from functional_par.comm.base import AllGather, AllReduce, Group, Handle, ReduceScatter
from functional_par.comm.solo import Done
from functional_par.errors import ModelError
from functional_par.kernel import Kernel
from functional_par.par import Par


def whole_sequence(x: Tensor, par: Par, seq_dim: int) -> Tensor:
    """The stream with its whole sequence, about to meet weights that are split over tp. ``stream -> varying``.

    ALL_REDUCE: no communication. REDUCE_SCATTER: all-gather along ``seq_dim``.
    """
    return par.all_gather(x, "tp", seq_dim) if par.sequence_split else par.pvary(x, "tp")


def to_stream(partial: Tensor, par: Par, seq_dim: int) -> Tensor:
    """The sum over tp of partial results, laid out as the stream. ``varying -> stream``. ``partial`` must be a fresh
    result that nobody else reads: its memory may be reused.

    Raises:
        ModelError: in REDUCE_SCATTER, if tp does not divide the sequence.
    """
    if par.sequence_split:
        window_length(partial.shape[seq_dim], par)
    return par.kernel(_to_stream, _to_stream_fast)(partial, par, seq_dim)


def sequence_window(v: Tensor, par: Par, dim: int) -> Tensor:
    """The part of a replicated parameter, indexed by position along ``dim``, that belongs to this rank's stream: all
    of it in ALL_REDUCE, the rank's own window in REDUCE_SCATTER.

    Raises:
        ModelError: in REDUCE_SCATTER, if tp does not divide the sequence.
    """
    if not par.sequence_split:
        return v
    length = window_length(v.shape[dim], par)
    return par.take(v, "tp", dim, tuple(length * i for i in range(par.size("tp"))), length)


def window_length(seq: int, par: Par) -> int:
    """Length of one rank's window of a sequence; ModelError if tp does not divide it."""
    tp = par.size("tp")
    if seq % tp:
        raise ModelError(
            f"a sequence of {seq} positions cannot be split over tp={tp}: {seq} = {seq // tp} * {tp} + {seq % tp}. "
            f"REDUCE_SCATTER needs a multiple of {tp}; choose another sequence length or tp, or mode ALL_REDUCE."
        )
    return seq // tp


def start_reduction(partial: Tensor, group: Group, seq_dim: int | None) -> Handle:
    """Start the sum of a cotangent over the group, scattered along ``seq_dim`` if there is one. ``partial`` is given
    away. While a graph of the backward is recorded, the collective is the differentiable one, done at once."""
    if torch.is_grad_enabled():
        if seq_dim is None:
            return Done(collectives.psum(partial, group))
        return Done(collectives.reduce_scatter(partial, group, seq_dim))
    op = AllReduce() if seq_dim is None else ReduceScatter(seq_dim)
    return group.start(op, partial, donate=True)


def _to_stream(partial: Tensor, par: Par, seq_dim: int) -> Tensor:
    return par.reduce_scatter(partial, "tp", seq_dim) if par.sequence_split else par.psum(partial, "tp")


def _to_stream_fast(partial: Tensor, par: Par, seq_dim: int) -> Tensor:
    if par.size("tp") == 1:
        return partial
    return _ToStream.apply(partial, par.group("tp"), seq_dim if par.sequence_split else None)


class _ToStream(Kernel):
    """``psum`` or ``reduce_scatter`` that reuses the memory of its input."""

    @staticmethod
    def forward(partial: Tensor, group: Group, seq_dim: int | None) -> Tensor:
        op = AllReduce() if seq_dim is None else ReduceScatter(seq_dim)
        out = group.start(op, partial, donate=True).wait()
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group, int | None], output: Tensor) -> None:
        _, ctx.group, ctx.seq_dim = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        if torch.is_grad_enabled():
            if ctx.seq_dim is None:
                return collectives.pvary(cotangent, ctx.group), None, None
            return collectives.all_gather(cotangent, ctx.group, ctx.seq_dim), None, None
        if ctx.seq_dim is None:
            return cotangent, None, None
        return ctx.group.start(AllGather(ctx.seq_dim), cotangent).wait(), None, None
