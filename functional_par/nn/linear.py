"""Linear layers whose weight is split over tp: by its outputs (column) or by its inputs (row). Megatron-LM, arXiv
1909.08053, section 3, and arXiv 2205.05198, section 4.2, for the stream split on the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_par.comm.base import AllGather
from functional_par.errors import ModelError
from functional_par.kernel import Kernel
from functional_par.nn.captured import Layout, captured_linear, cotangent_rows, input_gradient, project
from functional_par.nn.stream import start_reduction, to_stream, whole_sequence
from functional_par.par import Par

Weights = tuple[Tensor, ...]
Biases = tuple[Tensor | None, ...]


@overload
def column_linear(x: Tensor, weight: Tensor, par: Par, bias: Tensor | None = None, *, seq_dim: int = 1) -> Tensor: ...
@overload
def column_linear(
    x: Tensor, weight: Sequence[Tensor], par: Par, bias: Sequence[Tensor | None] | None = None, *, seq_dim: int = 1
) -> tuple[Tensor, ...]: ...
def column_linear(x: Any, weight: Any, par: Par, bias: Any = None, *, seq_dim: int = 1) -> Any:
    """``x @ weight.T + bias`` with the outputs split over tp. ``stream -> varying``.

    Several weights share one entry: one gathered input, and in backward one reduction of the sum of their input
    gradients. A weight that is not split (key/value heads that tp does not divide) is read whole by every rank.

    Args:
        x: the stream, [batch, seq, in] (seq is the local window in REDUCE_SCATTER).
        weight: [*out, in], or several. The first out dim is the one split over tp.
        bias: [*out], or one (or None) for each weight.

    Returns:
        [batch, seq, *out] of the whole sequence; a tuple when several weights were given.

    Forward makes no call in ALL_REDUCE and all-gathers ``x`` in REDUCE_SCATTER; backward sums the input gradient by
    one all-reduce or reduce-scatter, which runs while the weight gradients are computed if ``par.async_comm``.

    Raises:
        ModelError: for shapes that do not fit.

    >>> from functional_par.run_par import RunPar
    >>> column_linear(torch.ones(1, 2, 3), torch.ones(4, 5, 3), RunPar()).shape
    torch.Size([1, 2, 4, 5])
    """
    if isinstance(weight, Tensor):
        return column_linear(x, (weight,), par, (bias,), seq_dim=seq_dim)[0]
    weights = tuple(weight)
    biases = (None,) * len(weights) if bias is None else tuple(bias)
    if len(biases) != len(weights):
        raise ModelError(f"column_linear: {len(weights)} weights and {len(biases)} biases; give one (or None) each.")
    for w, b in zip(weights, biases, strict=True):
        _check("column_linear", x.shape[-1:], w.shape[-1:], w.shape[:-1], w, b)
    return par.kernel(_column, _column_fast)(x, weights, biases, par, seq_dim)


def row_linear(
    x: Tensor, weight: Tensor, par: Par, bias: Tensor | None = None, *, n_in: int = 1, seq_dim: int = 1
) -> Tensor:
    """``x @ weight.T`` summed over tp, plus ``bias``, with the inputs split over tp. ``varying -> stream``.

    Args:
        x: [batch, seq, *in] with the whole sequence; the first of the in dims is the one split over tp.
        weight: [out, *in].
        bias: [out], the same on every rank; it is added once, after the sum.
        n_in: number of in dims, which are contracted.

    Returns:
        The stream, [batch, seq, out] (seq is the local window in REDUCE_SCATTER).

    Forward makes one all-reduce or reduce-scatter; backward makes no call in ALL_REDUCE, one all-gather in
    REDUCE_SCATTER. Nothing is left to overlap, so ``par.async_comm`` changes nothing.

    Raises:
        ModelError: for shapes that do not fit, or a sequence that tp does not divide in REDUCE_SCATTER.

    >>> from functional_par.run_par import RunPar
    >>> row_linear(torch.ones(1, 2, 4, 5), torch.ones(3, 4, 5), RunPar(), n_in=2).shape
    torch.Size([1, 2, 3])
    """
    _check("row_linear", x.shape[-n_in:], weight.shape[1:], weight.shape[:1], weight, bias)
    return par.kernel(_row, _row_fast)(x.flatten(-n_in), weight, bias, par, seq_dim)


def _check(name: str, given: torch.Size, wanted: torch.Size, out: torch.Size, w: Tensor, bias: Tensor | None) -> None:
    if given != wanted:
        raise ModelError(
            f"{name}: the input ends in {list(given)} but a weight of shape {list(w.shape)} takes {list(wanted)}."
        )
    if bias is not None and bias.shape != out:
        raise ModelError(
            f"{name}: a weight of shape {list(w.shape)} takes a bias of {list(out)}, not {list(bias.shape)}."
        )


def _column(x: Tensor, weights: Weights, biases: Biases, par: Par, seq_dim: int) -> tuple[Tensor, ...]:
    whole = whole_sequence(x, par, seq_dim)
    return tuple(project(whole, w, b) for w, b in zip(weights, biases, strict=True))


def _column_fast(x: Tensor, weights: Weights, biases: Biases, par: Par, seq_dim: int) -> tuple[Tensor, ...]:
    overlapped = par.size("tp") > 1 and par.async_comm
    layout = Layout(par.group("tp"), seq_dim if par.sequence_split else None) if overlapped else None
    whole = x if overlapped else whole_sequence(x, par, seq_dim)
    outs = captured_linear(whole, weights, biases, par, layout)
    if outs is not None:
        return outs
    if layout is None:  # autograd already adds up the input gradients; only the overlap needs a pullback by hand
        return tuple(project(whole, w, b) for w, b in zip(weights, biases, strict=True))
    return _Column.apply(_Several(layout, len(weights)), x, *weights, *biases)[: len(weights)]


def _row(x: Tensor, weight: Tensor, bias: Tensor | None, par: Par, seq_dim: int) -> Tensor:
    return _leave(F.linear(x, weight.flatten(1)), bias, par, seq_dim)


def _row_fast(x: Tensor, weight: Tensor, bias: Tensor | None, par: Par, seq_dim: int) -> Tensor:
    inside = bias if par.size("tp") == 1 else None  # else it is added after the sum
    outs = captured_linear(x, (weight,), (inside,), par, n_in=weight.ndim - 1)
    y = F.linear(x, weight.flatten(1), inside) if outs is None else outs[0]
    return y if par.size("tp") == 1 else _leave(y, bias, par, seq_dim)


def _leave(y: Tensor, bias: Tensor | None, par: Par, seq_dim: int) -> Tensor:
    y = to_stream(y, par, seq_dim)
    return y if bias is None else y + bias


@dataclass(frozen=True, eq=False)
class _Several:
    """What the pullback has to know; opaque to torch. ``n``: number of weights."""

    layout: Layout
    n: int


class _Column(Kernel):
    """Column linear whose input gradient travels while the weight gradients are computed.

    The gathered input is an output too: the weight gradients then depend on it as on any value, so that derivatives
    of every order are right.
    """

    @staticmethod
    def forward(several: _Several, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        layout, n = several.layout, several.n
        gathered: tuple[Tensor, ...] = ()
        if layout.seq_dim is not None:
            x = layout.group.start(AllGather(layout.seq_dim), x).wait()
            gathered = (x,)
        pairs = zip(params[:n], params[n:], strict=True)
        return (*(project(x, w, b) for w, b in pairs if w is not None), *gathered)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        several, x, *params = inputs
        ctx.several = several
        whole = x if several.layout.seq_dim is None else output[several.n]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(whole, *params[: several.n])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        layout, n = ctx.several.layout, ctx.several.n
        whole, *weights = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[1:]
        rows = cotangent_rows(cotangents, weights)
        handle = None
        if needs_x:
            grad = input_gradient(rows, weights, whole)
            if layout.seq_dim is not None and (extra := cotangents[n]) is not None:
                grad = grad + extra
            handle = start_reduction(grad, layout.group, layout.seq_dim)
        flat = whole.reshape(-1, whole.shape[-1])
        grads = [
            (ct.t() @ flat).view(w.shape) if need and ct is not None else None
            for ct, w, need in zip(rows, weights, needs, strict=False)
        ]
        sums = [
            ct.sum(0).view(w.shape[:-1]) if need and ct is not None else None
            for ct, w, need in zip(rows, weights, needs[n:], strict=True)
        ]
        return None, None if handle is None else handle.wait(), *grads, *sums
