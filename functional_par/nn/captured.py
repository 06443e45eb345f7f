"""The kernels of linear layers and look-ups whose weights are captured: their pullbacks give input cotangents, and keep as data
what the weight gradients are computed from. See ``functional_par.capture``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_par.capture import Capture, Leaf, Product, Rows, Total
from functional_par.comm.base import AllGather, Group
from functional_par.kernel import Kernel
from functional_par.nn.stream import start_reduction
from functional_par.par import Par


@dataclass(frozen=True, eq=False)
class Layout:
    """How the stream lies that a column linear reads, for pullbacks that sum the input gradient themselves; opaque to torch.

    Attributes:
        seq_dim: the dim along which the stream is split, or None when it is whole.
    """

    group: Group
    seq_dim: int | None


@dataclass(frozen=True, eq=False)
class _Linear:
    """What the pullback has to know; opaque to torch. The raw weights are matrices, [out, in]."""

    weights: tuple[Leaf, ...]
    biases: tuple[Leaf | None, ...]
    outs: tuple[torch.Size, ...]
    capture: Capture
    layout: Layout | None


def captured_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    par: Par,
    layout: Layout | None = None,
    *,
    n_in: int = 1,
) -> tuple[Tensor, ...] | None:
    """``x @ weight.T + bias`` for each weight, all of them captured; None if one of them has to be differentiated.

    Args:
        x: [..., in]
        weights: [*out, *in]
        biases: [*out] or None
        layout: the input gradient is summed over its group, and ``x`` is gathered if it is split, here; None where neither is
            needed.
        n_in: number of in dims of a weight.
    """
    capture = par.capture
    found = None if capture is None else capture.leaves((*weights, *biases))
    if capture is None or found is None:
        return None
    n = len(weights)
    matrices = (leaf._replace(raw=leaf.raw.reshape(-1, x.shape[-1])) for leaf in found[:n] if leaf is not None)
    kept = _Linear(tuple(matrices), found[n:], tuple(w.shape[:-n_in] for w in weights), capture, layout)
    out: tuple[Tensor, ...] = _CapturedLinear.apply(x, None if x.requires_grad else capture.token, kept)
    return out[:n]


def captured_rows(ids: Tensor, weight: Tensor, par: Par) -> Tensor | None:
    """``weight[ids]`` with the table captured; None if it has to be differentiated."""
    capture = par.capture
    found = None if capture is None else capture.leaves((weight,))
    if capture is None or found is None or found[0] is None:
        return None
    rows: Tensor = _CapturedRows.apply(ids, capture.token, found[0], capture)
    return rows


def project(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """``x @ w.T + b`` with w [*out, in] and b [*out]."""
    if w.ndim == 2:
        return F.linear(x, w, b)
    y = F.linear(x, w.flatten(0, -2), None if b is None else b.flatten())
    return y.view(*y.shape[:-1], *w.shape[:-1])


def cotangent_rows(cotangents: Sequence[Tensor | None], weights: Sequence[Tensor]) -> list[Tensor | None]:
    """The cotangent of each output as [rows, out]."""
    return [
        None if ct is None else ct.reshape(-1, math.prod(w.shape[:-1]))
        for ct, w in zip(cotangents, weights, strict=False)
    ]


def input_gradient(rows: Sequence[Tensor | None], weights: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum over the weights of ``cotangent @ weight``, in one fresh buffer of the shape of ``like``."""
    total: Tensor | None = None
    for ct, w in zip(rows, weights, strict=True):
        if ct is not None:
            flat = w.flatten(0, -2)
            total = ct @ flat if total is None else total.addmm_(ct, flat)
    return torch.zeros_like(like) if total is None else total.view(like.shape)


class _CapturedLinear(Kernel):
    """With a layout, the sum of the input gradient travels while weight gradients are computed, if they are computed now."""

    @staticmethod
    def forward(x: Tensor, token: Tensor | None, kept: _Linear) -> tuple[Tensor, ...]:
        gathered: tuple[Tensor, ...] = ()
        if kept.layout is not None and kept.layout.seq_dim is not None:
            x = kept.layout.group.start(AllGather(kept.layout.seq_dim), x).wait()
            gathered = (x,)
        outs = []
        for w, b, out in zip(kept.weights, kept.biases, kept.outs, strict=True):
            y = F.linear(x, w.raw, None if b is None else b.raw.view(-1))
            outs.append(y if len(out) == 1 else y.view(*y.shape[:-1], *out))
        return (*outs, *gathered)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, ctx.kept = inputs
        gathered = output[len(ctx.kept.weights) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*gathered)
        ctx.save_for_backward(*(gathered or (x,)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        kept: _Linear = ctx.kept
        (whole,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # a graph of the backward is wanted: of the weights as the layer has them
        weights = [leaf.given.reshape(leaf.raw.shape) if again else leaf.raw for leaf in kept.weights]
        rows = cotangent_rows(cotangents, weights)
        grad, handle = None, None
        if ctx.needs_input_grad[0]:
            grad = input_gradient(rows, weights, whole)
            if kept.layout is not None:
                handle = start_reduction(grad, kept.layout.group, kept.layout.seq_dim)
        if not again:
            _give(kept, whole.detach(), rows)
        return grad if handle is None else handle.wait(), None, None


def _give(kept: _Linear, whole: Tensor, rows: Sequence[Tensor | None]) -> None:
    x = whole.reshape(-1, whole.shape[-1])
    for w, b, ct in zip(kept.weights, kept.biases, rows, strict=True):
        if ct is None:
            continue
        if w.path is not None:
            kept.capture.give(Product(w.path, x, ct.detach()))
        if b is not None and b.path is not None:
            kept.capture.give(Total(b.path, ct.detach()))


class _CapturedRows(Kernel):
    @staticmethod
    def forward(ids: Tensor, token: Tensor, table: Leaf, capture: Capture) -> Tensor:
        return F.embedding(ids, table.raw)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ids, _, ctx.table, ctx.capture = inputs
        ctx.save_for_backward(ids)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            ct = cotangent.reshape(-1, cotangent.shape[-1]).detach()
            ctx.capture.give(Rows(ctx.table.path, ids.detach().reshape(-1), ct))
        return None, None, None, None
