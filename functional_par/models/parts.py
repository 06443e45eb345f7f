"""What the language models share: descriptions of parameters, self-attention, the first layer and the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_par import init
from functional_par.errors import ModelError
from functional_par.model import Input
from functional_par.nn import attention, column_linear, linear_cross_entropy, rotary, row_linear
from functional_par.par import Par
from functional_par.spec import Param

IGNORED = -100
"""Label of a position without a loss."""

Params = Mapping[str, Any]


def check_sizes(model: str, **sizes: int) -> None:
    """ModelError unless every size is a positive integer."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ModelError(f"{model}({name}={size!r}): it is an integer of at least 1.")


def check_multiple(model: str, **sizes: int) -> None:
    """ModelError unless the first of two sizes is a multiple of the second."""
    (name, size), (unit, divisor) = sizes.items()
    if size % divisor:
        raise ModelError(f"{model}: {name}={size} is not a multiple of {unit}={divisor}.")


def check_rate(model: str, **rates: float) -> None:
    """ModelError unless every rate is a probability below 1."""
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
            raise ModelError(f"{model}({name}={rate!r}): a probability in [0, 1) is needed.")


def linear(dims: str, shape: tuple[int, ...], std: float, *, bias: str | None = None) -> dict[str, Param]:
    """A weight and, if ``bias`` names its dims (the first ones of the weight), a bias of zeros."""
    leaves = {"weight": Param(shape, dims, init.normal(std))}
    if bias is not None:
        leaves["bias"] = Param(shape[: len(bias.split())], bias, init.zeros())
    return leaves


def self_attention_params(
    d_model: int, n_heads: int, n_kv_heads: int | None, std: float, out_std: float, *, bias: bool
) -> dict[str, Any]:
    """Projections q, k, v and out. ``n_kv_heads=None`` is plain multi-head attention, whose k and v have heads."""
    head, (kv, n_kv) = d_model // n_heads, ("heads", n_heads) if n_kv_heads is None else ("kv_heads", n_kv_heads)

    def project(dim: str, n: int) -> dict[str, Param]:
        return linear(f"{dim} head embed", (n, head, d_model), std, bias=f"{dim} head" if bias else None)

    return {
        "q": project("heads", n_heads),
        "k": project(kv, n_kv),
        "v": project(kv, n_kv),
        "out": linear("embed heads head", (d_model, n_heads, head), out_std, bias="embed" if bias else None),
    }


def self_attention(
    params: Params, x: Tensor, par: Par, *, n_heads: int, n_kv_heads: int, theta: float | None = None
) -> Tensor:
    """Causal self-attention, with rotary positions if ``theta`` is given. ``stream -> stream``, [batch, seq, embed]."""
    names = ("q", "k", "v")
    weights = tuple(params[name]["weight"] for name in names)
    q, k, v = column_linear(x, weights, par, tuple(params[name].get("bias") for name in names))
    if theta is not None:
        q, k = rotary((q, k), par, theta)
    y = attention(q, k, v, par, n_heads=n_heads, n_kv_heads=n_kv_heads)
    return row_linear(y, params["out"]["weight"], par, params["out"].get("bias"), n_in=2)


def token_losses(params: Params, x: Tensor, par: Par, *, vocab: int) -> Tensor:
    """The loss of each position, zero where the label is ignored. [batch, seq, embed] -> [batch, seq]"""
    return linear_cross_entropy(x, params["weight"], par.batch["labels"], par, vocab=vocab, ignore_index=IGNORED)


def summed(params: Params, losses: Tensor, par: Par) -> tuple[Tensor, Tensor]:
    """The loss function of a language model, whose head gives the loss of each position."""
    return losses.sum(), (par.batch["labels"] != IGNORED).sum()


def token_batch(vocab: int, seq_len: int) -> dict[str, Input]:
    """The fields of a batch of token sequences."""
    return {name: Input((None, seq_len), torch.int64, high=vocab) for name in ("tokens", "labels")}
