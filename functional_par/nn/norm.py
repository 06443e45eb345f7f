"""Normalisation over the last dim, computed in float32 or better whatever the dtype of the stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_par.kernel import Kernel
from functional_par.par import Par


def rms_norm(x: Tensor, weight: Tensor, par: Par, eps: float = 1e-5) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (arXiv 1910.07467).

    Args:
        x: [..., embed].
        weight: [embed].

    Returns:
        [..., embed] in the dtype of ``x``.

    >>> from functional_par.run_par import RunPar
    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.ones(2), RunPar(), eps=0.0)
    tensor([0.8485, 1.1314])
    """
    return par.kernel(_rms_definition, _rms_fast)(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, par: Par, eps: float = 1e-5) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dim (arXiv 1607.06450).

    Args:
        x: [..., embed].
        weight, bias: [embed].

    Returns:
        [..., embed] in the dtype of ``x``.
    """
    if x.dtype == weight.dtype:  # torch then computes in float32 inside
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    wide = wide_dtype(x.dtype)
    shift = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), shift, eps).to(x.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _rms_definition(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(wide_dtype(x.dtype))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight).to(x.dtype)


def _rms_fast(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.device.type != "cpu" and x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)[0]


class _RmsNorm(Kernel):
    """Keeps the input and one number a row. Returns the output and that number."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.to(wide_dtype(x.dtype))
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = rstd.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return (wide * rstd).mul_(weight).to(x.dtype), rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, _: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the backward is wanted: differentiate the definition
            pull = torch.func.vjp(partial(_rms_definition, eps=ctx.eps), x, weight)[1]
            grad, grad_weight = pull(cotangent)
            return grad, grad_weight, None
        wide = wide_dtype(x.dtype)
        rows, ct = x.reshape(-1, x.shape[-1]).to(wide), cotangent.reshape(-1, x.shape[-1]).to(wide)
        scale, w = rstd.view(-1), weight.to(wide)
        product = rows * ct
        grad_weight = scale @ product
        # d rstd / d x = -rstd^3 x / n
        slope = (product @ w).mul_(scale.pow(3)).div_(-x.shape[-1])
        grad = torch.mul(ct, w, out=product).mul_(scale.unsqueeze(1)).addcmul_(rows, slope.unsqueeze(1))
        return grad.view(x.shape).to(x.dtype), grad_weight.to(weight.dtype), None
