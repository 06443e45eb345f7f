"""The head of a language model and its loss in one function, which keeps one tensor of the size of the logits and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_par.capture import Capture, Leaf, Product
from functional_par.comm.base import AllGather, AllReduce
from functional_par.errors import ModelError
from functional_par.kernel import Kernel
from functional_par.nn.cross_entropy import cross_entropy, hide
from functional_par.nn.embedding import check_range, check_vocab
from functional_par.nn.linear import column_linear
from functional_par.nn.norm import wide_dtype
from functional_par.nn.stream import start_reduction
from functional_par.par import Par


def linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, par: Par, *, vocab: int, ignore_index: int = -100
) -> Tensor:
    """``cross_entropy(column_linear(x, weight), labels)``, the same on every tp rank. ``stream -> replicated``.

    Args:
        x: the stream, [batch, seq, embed] (seq is the local window in REDUCE_SCATTER).
        weight: this rank's rows, [ceil(vocab / tp), embed]. Rows beyond ``vocab`` are padding and count for nothing.
        labels: integers [batch, seq] of the whole sequence, in [0, vocab), or ``ignore_index``, where the loss and its
            gradient are zero.
        vocab: number of rows of the whole weight, without padding.

    Returns:
        [batch, seq] in float32, or float64 for float64 logits.

    Communicates what the two functions do: forward a maximum and a sum, and an all-gather of ``x`` in REDUCE_SCATTER;
    backward the sum of the input gradient, which is under way while the gradient of the weight is computed.

    The logits are made a few rows at a time, turned into exponentials where they lie, and these into the gradient, so that
    each part is in the processor's cache. Where the weight is captured the gradient takes the place of what was saved.

    Raises:
        DataError: for a label out of range, on CPU. On other devices its loss is not a number.
        ModelError: for shapes that do not fit.

    >>> from functional_par.run_par import RunPar
    >>> x, weight, labels = torch.ones(1, 2, 3), torch.zeros(4, 3), torch.tensor([[3, -100]])
    >>> linear_cross_entropy(x, weight, labels, RunPar(), vocab=4)
    tensor([[1.3863, 0.0000]])
    """
    seq = x.shape[1] * par.size("tp") if par.sequence_split else x.shape[1]
    if labels.shape != (x.shape[0], seq) or x.shape[-1:] != weight.shape[1:]:
        raise ModelError(
            f"linear_cross_entropy: x {list(x.shape)}, a weight {list(weight.shape)} and labels {list(labels.shape)}; they are "
            f"[batch, seq, embed], [vocab / tp, embed] and [batch, seq] of the whole sequence, here {[x.shape[0], seq]}."
        )
    check_vocab("linear_cross_entropy", weight.shape[0], vocab, par)
    check_range("label", labels, vocab, ignore_index)
    return par.kernel(_definition, _fast)(x, weight, labels, par, vocab, ignore_index)


def _definition(x: Tensor, weight: Tensor, labels: Tensor, par: Par, vocab: int, ignore_index: int) -> Tensor:
    return cross_entropy(column_linear(x, weight, par), labels, par, vocab=vocab, ignore_index=ignore_index)


@dataclass(frozen=True, eq=False)
class _Head:
    """What the kernel has to know; opaque to torch. ``leaf``: the weight, if it is captured."""

    par: Par
    vocab: int
    ignore_index: int
    capture: Capture | None = None
    leaf: Leaf | None = None

    def valid(self, columns: int) -> int:
        """Number of this rank's columns that are not padding."""
        return min(max(self.vocab - self.par.group("tp").index * columns, 0), columns)


def _fast(x: Tensor, weight: Tensor, labels: Tensor, par: Par, vocab: int, ignore_index: int) -> Tensor:
    capture = par.capture
    found = None if capture is None else capture.leaves((weight,))
    if capture is None or found is None:
        return _LinearCrossEntropy.apply(x, weight, labels, _Head(par, vocab, ignore_index))[0]
    token = None if x.requires_grad else capture.token
    return _LinearCrossEntropy.apply(x, token, labels, _Head(par, vocab, ignore_index, capture, found[0]))[0]


class _LinearCrossEntropy(Kernel):
    """Returns the loss and what backward needs: exponentials, their scale (of which the product is the softmax), the local
    target column or -1, and the gathered input if it was gathered."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, labels: Tensor, head: _Head) -> tuple[Tensor, ...]:
        w, group = head.leaf.raw if head.leaf is not None else weight, head.par.group("tp")
        assert w is not None
        split = head.par.sequence_split and group.size > 1
        whole = group.start(AllGather(1), x).wait() if split else x
        columns, flat = w.shape[0], labels.reshape(-1)
        local = flat - group.index * columns
        hit = torch.where((local >= 0) & (local < columns) & (flat != head.ignore_index), local, -1)
        exps, peak, sums, target = _exponentials(whole.reshape(-1, x.shape[-1]), w, hit, head.valid(columns))
        top = group.start(AllReduce("max"), peak).wait()
        # A rank that holds nothing but padding has the lowest number as its peak: its factor is zero.
        factor = (peak - top).exp_()
        parts = torch.stack([sums * factor, (target - top).masked_fill_(hit < 0, 0.0)])
        total, target = group.start(AllReduce(), parts, donate=True).wait().unbind()
        loss = hide(total.log() - target, flat, head.vocab, head.ignore_index).view(labels.shape)
        scale = factor.div_(total).masked_fill_(flat == head.ignore_index, 0.0)
        return (loss, exps, scale, hit, whole) if split else (loss, exps, scale, hit)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, labels, ctx.head = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, labels, *output[1:])

    @staticmethod
    def backward(ctx: Any, ct: Tensor | None, *_: None) -> Any:
        head: _Head = ctx.head
        if ct is None:
            return None, None, None, None
        x, weight, labels, exps, scale, hit, *gathered = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the backward is wanted: differentiate the definition
            return *_again(ctx.needs_input_grad, x, weight, labels, head, ct), None, None
        whole = gathered[0] if gathered else x
        slope = _Slope(exps, scale * ct.reshape(-1), hit, ct.reshape(-1))
        if head.leaf is not None:
            return _captured(ctx.needs_input_grad[0], head, head.leaf, whole, slope), None, None, None
        return *_differentiated(ctx.needs_input_grad, head, weight, whole, slope), None, None


def _exponentials(x: Tensor, w: Tensor, hit: Tensor, valid: int) -> tuple[Tensor, ...]:
    """Of the logits ``x @ w.T`` of this rank's columns, row by row: exp(logits - m), the maximum m, the sum, and the logit
    of the target column. Columns from ``valid`` on are padding."""
    dtype = wide_dtype(x.dtype)
    exps = x.new_empty(x.shape[0], w.shape[0])
    peak = x.new_full(x.shape[:1], torch.finfo(dtype).min, dtype=dtype)
    sums, target = x.new_zeros(x.shape[:1], dtype=dtype), x.new_zeros(x.shape[:1], dtype=dtype)
    if valid < w.shape[0]:
        exps[:, valid:].zero_()
    for at in _blocks(exps) if valid else ():
        logits = _product(x[at], w, exps[at])
        torch.gather(logits, 1, hit[at, None].clamp(min=0), out=target[at, None])
        real = logits[:, :valid]
        torch.amax(real, 1, out=peak[at])
        torch.sum(real.sub_(peak[at, None]).exp_(), 1, out=sums[at])
        logits[:, valid:].zero_()
        if logits.dtype != exps.dtype:
            exps[at] = logits
    return exps, peak, sums, target


def _product(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """``x @ w.T`` in float32 or better: in ``out``, if that has the dtype."""
    y = torch.mm(x, w.t(), out=out)
    return y.to(wide_dtype(x.dtype))


def _blocks(exps: Tensor) -> Iterator[slice]:
    """Rows that are done together."""
    most = _BLOCK if exps.device.type == "cpu" else _LARGE_BLOCK
    rows = max(1, most // max(exps.shape[1], 1))
    return (slice(i, i + rows) for i in range(0, exps.shape[0], rows))


@dataclass(frozen=True)
class _Slope:
    """Where the gradient of the logits comes from: ``exps * slope`` less ``ct`` at the target column."""

    exps: Tensor
    slope: Tensor
    hit: Tensor
    ct: Tensor

    def block(self, at: slice, *, in_place: bool) -> Tensor:
        """Some rows of the gradient of the logits."""
        exps, hit = self.exps[at], self.hit[at, None]
        slope = self.slope[at, None]
        same = exps.dtype == slope.dtype
        grad = exps.mul_(slope) if in_place and same else exps * slope
        grad.scatter_add_(1, hit.clamp(min=0), torch.where(hit >= 0, -self.ct[at, None], 0.0))
        return grad if same else exps.copy_(grad) if in_place else grad.to(exps.dtype)


def _captured(needs_x: bool, head: _Head, leaf: Leaf, whole: Tensor, slope: _Slope) -> Tensor | None:
    """The gradient of the logits takes the place of the exponentials: a layer's pullback runs once, and torch tells if not."""
    group, rows = head.par.group("tp"), whole.reshape(-1, whole.shape[-1])
    grad = torch.empty_like(rows) if needs_x else None
    for at in _blocks(slope.exps):
        block = slope.block(at, in_place=True)
        if grad is not None:
            torch.mm(block, leaf.raw, out=grad[at])
    handle = None if grad is None else start_reduction(grad.view(whole.shape), group, _seq_dim(head.par))
    if head.capture is not None and leaf.path is not None:
        head.capture.give(Product(leaf.path, rows.detach(), slope.exps.detach()))
    return None if handle is None else handle.wait()


def _differentiated(
    needs: tuple[bool, ...], head: _Head, weight: Tensor, whole: Tensor, slope: _Slope
) -> tuple[Tensor | None, Tensor | None]:
    """The same out of place, with the gradient of the weight added up block by block."""
    group, rows = head.par.group("tp"), whole.reshape(-1, whole.shape[-1])
    grad = torch.empty_like(rows) if needs[0] else None
    grad_weight = torch.zeros_like(weight) if needs[1] else None
    for at in _blocks(slope.exps):
        block = slope.block(at, in_place=False)
        if grad is not None:
            torch.mm(block, weight, out=grad[at])
        if grad_weight is not None:
            grad_weight.addmm_(block.t(), rows[at])
    if grad is None:
        return None, grad_weight
    return start_reduction(grad.view(whole.shape), group, _seq_dim(head.par)).wait(), grad_weight


def _again(
    needs: tuple[bool, ...], x: Tensor, weight: Tensor | None, labels: Tensor, head: _Head, ct: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients as functions of everything they depend on."""
    define = partial(_definition, labels=labels, par=head.par, vocab=head.vocab, ignore_index=head.ignore_index)
    leaf = head.leaf
    if leaf is not None:
        return torch.func.vjp(lambda x: define(x, leaf.given), x)[1](ct)[0] if needs[0] else None, None
    grad, grad_weight = torch.func.vjp(define, x, weight)[1](ct)
    return grad if needs[0] else None, grad_weight if needs[1] else None


def _seq_dim(par: Par) -> int | None:
    return 1 if par.sequence_split else None


_BLOCK = 1 << 22
"""Logits in one block on CPU: some are read many times, and the weight once a block."""

_LARGE_BLOCK = 1 << 26
"""The same on other devices."""
