"""How each operation travels through torch.distributed: the layout of what is sent, and how the result is read off.

Process groups move chunks along dim 0, so other dims are moved there before and back after. Contiguous inputs are not
copied, except by an all-reduce that may not overwrite its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_par.comm.base import AllGather, AllReduce, AllToAll, Op, Permute, ReduceScatter

# torch 2.13 renamed two functions and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_UNWRITTEN = 0xA5


@dataclass(frozen=True)
class Wire:
    """A process group as one of its ranks sees it.

    Attributes:
        group: the process group.
        ranks: its world ranks in increasing order.
        index: this rank's position among them.
        backend: ``"gloo"`` or ``"nccl"``.
    """

    group: Any
    ranks: tuple[int, ...]
    index: int
    backend: str


Started = tuple[list[Any], Callable[[], Tensor]]
"""Works to wait for, and then the function that yields the result."""


def start(wire: Wire, op: Op, x: Tensor, donate: bool, tag: int) -> Started:
    """Start ``op`` on ``x``; ``tag`` tells apart the permutations under way in a group."""
    if isinstance(op, AllReduce):
        return _all_reduce(wire, op, x, donate)
    if isinstance(op, AllGather):
        out = x.new_empty((len(wire.ranks), *x.shape))
        work = _all_gather(out.view(-1), x.contiguous().view(-1), group=wire.group, async_op=True)
        return [work], lambda: _join(out, op.dim)
    if isinstance(op, ReduceScatter):
        return _start_reduce_scatter(wire, op, x)
    if isinstance(op, AllToAll):
        work, out = _exchange(wire, _cut(x, op.split, len(wire.ranks)))
        return [work], lambda: _join(out, op.concat)
    return _permute(wire, op, x.contiguous(), tag)


def _all_reduce(wire: Wire, op: AllReduce, x: Tensor, donate: bool) -> Started:
    out = x.contiguous() if donate else x.clone(memory_format=torch.contiguous_format)
    kind = dist.ReduceOp.MAX if op.op == "max" else dist.ReduceOp.SUM
    return [dist.all_reduce(out, kind, group=wire.group, async_op=True)], lambda: out


def _start_reduce_scatter(wire: Wire, op: ReduceScatter, x: Tensor) -> Started:
    chunks = _cut(x, op.dim, len(wire.ranks))
    if wire.backend == "gloo":
        # gloo's own costs about twice its all-reduce. Summed here, in group order, it costs less at every size.
        work, out = _exchange(wire, chunks)
        return [work], lambda: reduce(torch.add, out.unbind(0))
    mine = torch.empty_like(chunks[0])
    return [_reduce_scatter(mine.view(-1), chunks.view(-1), group=wire.group, async_op=True)], lambda: mine


def _exchange(wire: Wire, chunks: Tensor) -> tuple[Any, Tensor]:
    out = torch.empty_like(chunks)
    return dist.all_to_all_single(out, chunks, group=wire.group, async_op=True), out


def _permute(wire: Wire, op: Permute, x: Tensor, tag: int) -> Started:
    to, source = op.to[wire.index], op.to.index(wire.index)
    if to == wire.index:
        return [], x.clone
    out = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, wire.ranks[to], wire.group, tag)
    recv = dist.P2POp(dist.irecv, out, wire.ranks[source], wire.group, tag)
    return dist.batch_isend_irecv([send, recv]), lambda: out


def _cut(x: Tensor, dim: int, count: int) -> Tensor:
    """``[count, ...]``: equal chunks along ``dim``, stacked in front."""
    return x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()


def _join(chunks: Tensor, dim: int) -> Tensor:
    """Chunks that are stacked in front, concatenated along ``dim``."""
    return chunks.movedim(0, dim).flatten(dim, dim + 1)


def mark_end(x: Tensor) -> Callable[[], bool]:
    """Fill the last bytes of ``x`` with a pattern; the returned function tells whether they are still there.

    gloo takes a message that is too short for its buffer without a word. (It aborts the process for one too long.)
    """
    narrow = (
        x.itemsize < 4 and not x.is_floating_point() and x.dtype != torch.bool
    )  # such integers may well be the pattern
    if x.device.type != "cpu" or x.nbytes < 8 or narrow:
        return lambda: False
    tail = x.view(-1)[-math.ceil(8 / x.itemsize) :].view(torch.uint8)
    tail.fill_(_UNWRITTEN)
    return lambda: bool((tail == _UNWRITTEN).all())
