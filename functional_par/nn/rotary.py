"""Rotary position embedding (arXiv 2104.09864), in the convention of Llama: dim i turns with dim i + head / 2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, overload

import torch
from torch import Tensor

from functional_par.errors import ModelError
from functional_par.kernel import Kernel, outside_transforms
from functional_par.nn.norm import wide_dtype
from functional_par.par import Par

Several = tuple[Tensor, ...]


@overload
def rotary(x: Tensor, par: Par, theta: float = 10000.0, positions: Tensor | None = None) -> Tensor: ...
@overload
def rotary(x: Sequence[Tensor], par: Par, theta: float = 10000.0, positions: Tensor | None = None) -> Several: ...
def rotary(x: Any, par: Par, theta: float = 10000.0, positions: Tensor | None = None) -> Any:
    """Turn each pair of dims (i, i + head / 2) by the angle ``position * theta ** (-2 i / head)``.

    Args:
        x: [batch, seq, heads, head], head even; or several of one sequence and head size, such as queries and keys.
        theta: base of the wavelengths.
        positions: global position of each row, integers [seq]; by default 0 to seq - 1.

    Returns:
        Like ``x``. Computed in float32 or better; the angles in float64.

    Raises:
        ModelError: if the head size is odd, or several tensors do not go together.

    >>> from functional_par.run_par import RunPar
    >>> rotary(torch.ones(1, 2, 1, 2), RunPar()).flatten(2)
    tensor([[[ 1.0000,  1.0000],
             [-0.3012,  1.3818]]])
    """
    if isinstance(x, Tensor):
        return rotary((x,), par, theta, positions)[0]
    xs = tuple(x)
    if xs[0].shape[-1] % 2:
        raise ModelError(f"rotary: the head size must be even, not {xs[0].shape[-1]}.")
    if len({(y.shape[1], y.shape[-1], y.dtype) for y in xs}) > 1:
        raise ModelError(
            f"rotary: tensors of the shapes {', '.join(str(list(y.shape)) for y in xs)} are turned together only if they have "
            "one sequence, head size and dtype. Turn them one by one."
        )
    return par.kernel(_definition, _fast)(xs, theta, positions)


def _table(positions: Tensor, half: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [seq, 1, half]."""
    powers = torch.arange(half, dtype=torch.float64, device=positions.device) / half
    angles = positions.to(torch.float64)[:, None, None] * theta**-powers
    return angles.cos().to(dtype), angles.sin().to(dtype)


@lru_cache(maxsize=8)
def _first(seq: int, half: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The table of the positions from 0 on."""
    return _table(torch.arange(seq, device=device), half, theta, dtype)


def _table_for(x: Tensor, theta: float, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """The table that ``x`` is turned by: one for all calls alike, but in a transform, whose tensors die with it."""
    size = x.shape[-1] // 2, theta, wide_dtype(x.dtype)
    if positions is not None:
        return _table(positions, *size)
    return (_first if outside_transforms() else _first.__wrapped__)(x.shape[1], *size, x.device)


def _definition(xs: Several, theta: float, positions: Tensor | None) -> Several:
    if positions is None:
        positions = torch.arange(xs[0].shape[1], device=xs[0].device)
    table = _table(positions, xs[0].shape[-1] // 2, theta, wide_dtype(xs[0].dtype))
    return tuple(_turn_plain(x, *table) for x in xs)


def _turn_plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _fast(xs: Several, theta: float, positions: Tensor | None) -> Several:
    turned: Several = _Turn.apply(theta, positions, *xs)
    return turned


class _Turn(Kernel):
    """A rotation; its transpose is the rotation by the negative angles, here those of negative sines."""

    @staticmethod
    def forward(theta: float, positions: Tensor | None, *xs: Tensor) -> Several:
        cos, sin = _table_for(xs[0], theta, positions)
        return tuple(_turn(x, cos, sin) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Several) -> None:
        ctx.theta, positions, *_ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(positions)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        (positions,), turn = ctx.saved_tensors, _turn_plain if torch.is_grad_enabled() else _turn
        back: list[Tensor | None] = []
        for ct in cotangents:
            if ct is not None:
                cos, sin = _table_for(ct, ctx.theta, positions)
                back.append(turn(ct, cos, -sin))
            else:
                back.append(None)
        return None, None, *back


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation; on CPU in blocks of positions that stay in the processor's cache."""
    batch, seq, heads, head = x.shape
    out = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    if x.device.type != "cpu" or x.numel() <= _BLOCK:
        torch.mul(x, cos, out=out).addcmul_(_swap(x), sin)
        return out.to(x.dtype)
    block = max(1, _BLOCK // (heads * head))
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
