"""Cross-entropy of logits whose vocabulary is split over tp (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_par.comm import collectives
from functional_par.comm.base import AllReduce, Group
from functional_par.errors import ModelError
from functional_par.kernel import Kernel
from functional_par.nn.embedding import check_range, check_vocab
from functional_par.nn.norm import wide_dtype
from functional_par.par import Par


def cross_entropy(logits: Tensor, labels: Tensor, par: Par, *, vocab: int, ignore_index: int = -100) -> Tensor:
    """``logsumexp(logits) - logits[label]`` of each position, the same on every tp rank.

    Args:
        logits: this rank's columns, [batch, seq, ceil(vocab / tp)]. Columns beyond ``vocab`` are padding and count as
            minus infinity, whatever they hold.
        labels: integers [batch, seq] in [0, vocab), or ``ignore_index``, where the loss and its gradient are zero.
        vocab: number of columns of the whole, without padding.

    Returns:
        [batch, seq] in float32, or float64 for float64 logits.

    Forward makes two small all-reduces (a maximum and a sum), backward none. The fast kernel keeps one tensor of the
    size of the logits.

    Raises:
        DataError: for a label out of range, on CPU. On other devices its loss is not a number.
        ModelError: for shapes that do not fit.

    >>> from functional_par.run_par import RunPar
    >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]]), RunPar(), vocab=4)
    tensor([[1.3863, 0.0000]])
    """
    if logits.shape[:-1] != labels.shape:
        raise ModelError(
            f"cross_entropy: logits {list(logits.shape)} take labels of {list(logits.shape[:-1])}, "
            f"not {list(labels.shape)}."
        )
    check_vocab("cross_entropy", logits.shape[-1], vocab, par)
    check_range("label", labels, vocab, ignore_index)
    return par.kernel(_definition, _fast)(logits, labels, par, vocab, ignore_index)


def _definition(logits: Tensor, labels: Tensor, par: Par, vocab: int, ignore_index: int) -> Tensor:
    columns = logits.shape[-1]
    start = par.axis_index("tp") * columns
    wide = logits.to(wide_dtype(logits.dtype))
    wide = wide.masked_fill(torch.arange(columns, device=logits.device) + start >= vocab, -torch.inf)
    peak = par.pmax(wide.detach().amax(-1), "tp")
    shifted = wide - par.pvary(peak, "tp").unsqueeze(-1)
    local = labels - start
    mine = (local >= 0) & (local < columns)
    target = shifted.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
    parts = torch.stack([shifted.exp().sum(-1), torch.where(mine, target, 0)])
    total, target = par.psum(parts, "tp").unbind()
    return hide(total.log() - target, labels, vocab, ignore_index)


def hide(loss: Tensor, labels: Tensor, vocab: int, ignore_index: int) -> Tensor:
    """Zero where the label is ignored, not a number where it is out of range."""
    ignored = labels == ignore_index
    outside = ((labels < 0) | (labels >= vocab)) & ~ignored
    return loss.masked_fill(ignored, 0.0).masked_fill(outside, torch.nan)


@dataclass(frozen=True, eq=False)
class _Split:
    """How the vocabulary lies; opaque to torch."""

    group: Group
    vocab: int
    ignore_index: int

    def valid(self, columns: int) -> int:
        """Number of this rank's columns that are not padding."""
        return min(max(self.vocab - self.group.index * columns, 0), columns)


def _fast(logits: Tensor, labels: Tensor, par: Par, vocab: int, ignore_index: int) -> Tensor:
    return _CrossEntropy.apply(logits, labels, _Split(par.group("tp"), vocab, ignore_index))[0]


class _CrossEntropy(Kernel):
    """Returns the loss and what backward needs: exponentials, their scale (of which the product is the softmax), and
    the local target column or -1. These are outputs like any other, so that derivatives of every order are right."""

    @staticmethod
    def forward(logits: Tensor, labels: Tensor, split: _Split) -> tuple[Tensor, ...]:
        columns = logits.shape[-1]
        peak, exps, sums = _local_exps(logits, split.valid(columns))
        top = split.group.start(AllReduce("max"), peak).wait()
        # A rank that holds nothing but padding has the lowest number as its peak: its factor is zero.
        factor = (peak - top).exp_()
        local = labels - split.group.index * columns
        mine = (local >= 0) & (local < columns)
        target = logits.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
        target = (target - top).masked_fill_(~mine, 0.0)
        parts = torch.stack([sums * factor, target])
        total, target = split.group.start(AllReduce(), parts, donate=True).wait().unbind()
        loss = hide(total.log() - target, labels, split.vocab, split.ignore_index)
        scale = factor.div_(total).masked_fill_(labels == split.ignore_index, 0.0)
        hit = torch.where(mine & (labels != split.ignore_index), local, -1)
        return loss, exps, scale, hit

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, exps, scale, hit = output
        ctx.mark_non_differentiable(hit)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.group = inputs[0].dtype, inputs[2].group
        ctx.save_for_backward(exps, scale, hit)

    @staticmethod
    def backward(ctx: Any, ct: Tensor | None, ct_exps: Tensor | None, ct_scale: Tensor | None, _: None) -> Any:
        exps, scale, hit = ctx.saved_tensors
        ct = torch.zeros_like(scale) if ct is None else _vary(ct, ctx.group)
        slope = scale * ct
        # The other cotangents arrive when a backward is differentiated, and only then.
        if ct_scale is not None:
            slope = slope - scale * _vary(_sum(ct_scale * scale, ctx.group), ctx.group)
        slope = slope.unsqueeze(-1)
        grad = exps * (slope if ct_exps is None else slope + ct_exps)
        mine = hit >= 0
        drop = torch.where(mine, -ct, 0).unsqueeze(-1)
        grad = grad.scatter_add_(-1, torch.where(mine, hit, 0).unsqueeze(-1), drop)
        return grad.to(ctx.dtype), None, None


def _vary(x: Tensor, group: Group) -> Tensor:
    """``x``, about to meet what varies; nothing where no graph of the backward is recorded."""
    return collectives.pvary(x, group) if torch.is_grad_enabled() and group.size > 1 else x


def _sum(x: Tensor, group: Group) -> Tensor:
    return collectives.psum(x, group) if group.size > 1 else x


def _local_exps(logits: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's columns: the maximum m [batch, seq], exp(logits - m), and the sum of that. Padding counts as
    minus infinity. Rows go in blocks that stay in the processor's cache."""
    dtype = wide_dtype(logits.dtype)
    rows = logits.reshape(-1, logits.shape[-1])
    exps = torch.empty(rows.shape, dtype=dtype, device=logits.device)
    peak = torch.full(rows.shape[:1], torch.finfo(dtype).min, dtype=dtype, device=logits.device)
    sums = torch.zeros(rows.shape[:1], dtype=dtype, device=logits.device)
    exps[:, valid:].zero_()
    block = max(1, _BLOCK // max(valid, 1)) if logits.device.type == "cpu" else max(1, len(rows))
    for i in range(0, len(rows) if valid else 0, block):
        part, out = rows[i : i + block, :valid], exps[i : i + block, :valid]
        top = part.amax(-1).to(dtype)
        peak[i : i + block] = top
        torch.sub(part, top.unsqueeze(-1), out=out)
        torch.sum(out.exp_(), -1, out=sums[i : i + block])
    shape = logits.shape[:-1]
    return peak.view(shape), exps.view(logits.shape), sums.view(shape)


_BLOCK = 1 << 16
"""Elements of logits in one block."""
