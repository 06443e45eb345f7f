"""Causal attention whose heads are split over tp. It makes no call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_par.errors import ModelError
from functional_par.par import Par


def attention(
    q: Tensor, k: Tensor, v: Tensor, par: Par, *, n_heads: int, n_kv_heads: int, causal: bool = True
) -> Tensor:
    """Scaled dot-product attention of this rank's query heads (arXiv 1706.03762; grouped heads: arXiv 2305.13245).

    Query head ``i`` reads key/value head ``i // (n_heads / n_kv_heads)``.

    Args:
        q: [batch, seq, n_heads / tp, head].
        k, v: [batch, seq, n_kv_heads / tp, head], or all ``n_kv_heads`` on every rank where tp does not divide them.
        n_heads, n_kv_heads: numbers of heads on all ranks together.

    Returns:
        [batch, seq, n_heads / tp, head].

    Raises:
        ModelError: for numbers of heads that do not divide, or do not fit the tensors.
    """
    check_heads(n_heads, n_kv_heads, par)
    tp = par.size("tp")
    local, kv_local = n_heads // tp, n_kv_heads if n_kv_heads % tp else n_kv_heads // tp
    if (q.shape[2], k.shape[2], v.shape[2]) != (local, kv_local, kv_local):
        raise ModelError(
            f"attention: n_heads={n_heads}, n_kv_heads={n_kv_heads} over tp={tp} are {local} query and {kv_local} "
            f"key/value heads a rank, but q, k, v have {q.shape[2]}, {k.shape[2]}, {v.shape[2]}."
        )
    if n_kv_heads % tp:
        k, v = (_own_heads(x, local, n_heads // n_kv_heads, par) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=k.shape[2] != local
    )
    return out.transpose(1, 2)


def check_heads(n_heads: int, n_kv_heads: int, par: Par) -> None:
    """ModelError unless tp divides the query heads, and the key/value heads divide them."""
    tp = par.size("tp")
    if n_heads % n_kv_heads:
        raise ModelError(
            f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}: heads share in equal groups."
        )
    if n_heads % tp:
        raise ModelError(f"n_heads={n_heads} cannot be split over tp={tp}: choose a tp that divides the heads.")


def _own_heads(x: Tensor, local: int, group: int, par: Par) -> Tensor:
    """Of key/value heads that every rank has whole, those that its query heads read: one if it serves them all, else
    one for each query head. [batch, seq, n_kv_heads, head] -> [batch, seq, 1 or local, head]."""
    ranks = range(par.size("tp"))
    if group % local == 0:
        return par.take(x, "tp", 2, tuple(r * local // group for r in ranks), 1)
    heads = torch.arange(local, device=x.device) + par.axis_index("tp") * local
    return x.index_select(2, heads // group)
