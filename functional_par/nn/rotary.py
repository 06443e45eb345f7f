"""Rotary position embedding (arXiv 2104.09864), in the convention of Llama: dim i turns with dim i + head / 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_par.errors import ModelError
from functional_par.kernel import Kernel
from functional_par.nn.norm import wide_dtype
from functional_par.par import Par


def rotary(x: Tensor, par: Par, theta: float = 10000.0, positions: Tensor | None = None) -> Tensor:
    """Turn each pair of dims (i, i + head / 2) by the angle ``position * theta ** (-2 i / head)``.

    Args:
        x: [batch, seq, heads, head], head even.
        theta: base of the wavelengths.
        positions: global position of each row, integers [seq]; by default 0 to seq - 1.

    Returns:
        Like ``x``. Computed in float32 or better; the angles in float64.

    Raises:
        ModelError: if the head size is odd.

    >>> from functional_par.run_par import RunPar
    >>> rotary(torch.ones(1, 2, 1, 2), RunPar()).flatten(2)
    tensor([[[ 1.0000,  1.0000],
             [-0.3012,  1.3818]]])
    """
    if x.shape[-1] % 2:
        raise ModelError(f"rotary: the head size must be even, not {x.shape[-1]}.")
    cos, sin = _table(x, theta, positions)
    return par.kernel(_definition, _fast)(x, cos, sin)


def _table(x: Tensor, theta: float, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [seq, 1, head / 2]."""
    half = x.shape[-1] // 2
    if positions is None:
        positions = torch.arange(x.shape[1], device=x.device)
    powers = torch.arange(half, dtype=torch.float64, device=x.device) / half
    angles = positions.to(torch.float64)[:, None, None] * theta**-powers
    dtype = wide_dtype(x.dtype)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _fast(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Turn.apply(x, cos, sin)


class _Turn(Kernel):
    """A rotation; its transpose is the rotation back."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _turn(x, cos, sin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        turn = _Turn.apply if torch.is_grad_enabled() else _turn
        return turn(cotangent, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation in blocks of positions that stay in the processor's cache."""
    batch, seq, heads, head = x.shape
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    if x.device.type != "cpu":
        return torch.mul(x, cos, out=out).addcmul_(_swap(x), sin).to(x.dtype)
    block = max(1, _BLOCK // max(1, heads * head))
    for i in range(batch):
        for s in range(0, seq, block):
            at = slice(s, s + block)
            torch.mul(x[i, at], cos[at], out=out[i, at]).addcmul_(_swap(x[i, at]), sin[at])
    return out.to(x.dtype)


def _swap(x: Tensor) -> Tensor:
    """The halves of each head, exchanged."""
    a, b = x.chunk(2, -1)
    return torch.cat([b, a], -1)


_BLOCK = 1 << 17
"""Elements in one block."""
