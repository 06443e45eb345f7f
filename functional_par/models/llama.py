"""A Llama-like language model: rotary positions, RMSNorm before each half block, grouped-query heads, SwiGLU."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from functional_par import init, nn
from functional_par.model import Model
from functional_par.models import parts
from functional_par.models.parts import Params, linear
from functional_par.nn import embedding, rms_norm, swiglu_mlp
from functional_par.par import Par
from functional_par.spec import Param


def llama(
    vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    seq_len: int,
    n_kv_heads: int | None = None,
    d_ff: int | None = None,
    rope_theta: float = 10000.0,
    norm_eps: float = 1e-5,
    init_std: float = 0.02,
    dropout: float = 0.0,
) -> Model:
    """A Llama-like model without biases, whose head has a weight of its own.

    Args:
        vocab: number of tokens.
        d_model: size of the stream; a multiple of ``2 * n_heads``, since rotary positions turn pairs of dims.
        n_layers: number of blocks.
        n_heads: number of query heads; a multiple of ``n_kv_heads``.
        seq_len: length of the sequences.
        n_kv_heads: number of key/value heads; by default ``n_heads``.
        d_ff: hidden size of the feed-forward half; by default ``8/3 * d_model`` rounded up to a multiple of 32.
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the mean square.
        init_std: of the normal initial weights; projections back into the stream get it over ``sqrt(2 * n_layers)``.
        dropout: rate after the embedding and after the attention and the feed-forward half of each block. It changes no
            parameter: evaluate with the same model made with a rate of 0.

    Raises:
        ModelError: for a size that is not positive, heads that do not divide, or a rate outside [0, 1).

    >>> model = llama(vocab=256, d_model=64, n_layers=2, n_heads=4, seq_len=32, n_kv_heads=2)
    >>> str(model.leaves["blocks.0.attn.k.weight"].dims)
    'kv_heads head embed'
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    d_ff = -(-8 * d_model // 96) * 32 if d_ff is None else d_ff
    parts.check_sizes("llama", vocab=vocab, d_model=d_model, n_layers=n_layers, n_heads=n_heads, seq_len=seq_len)
    parts.check_sizes("llama", n_kv_heads=n_kv_heads, d_ff=d_ff)
    parts.check_multiple("llama", n_heads=n_heads, n_kv_heads=n_kv_heads)
    parts.check_multiple("llama", **{"d_model": d_model, "2 * n_heads": 2 * n_heads})
    parts.check_rate("llama", dropout=dropout)
    out_std = init_std / math.sqrt(2 * n_layers)

    def norm() -> dict[str, Param]:
        return {"weight": Param((d_model,), "embed", init.ones())}

    def block_params() -> dict[str, Any]:
        mlp = {name: linear("ffn embed", (d_ff, d_model), init_std) for name in ("gate", "up")}
        mlp["down"] = linear("embed ffn", (d_model, d_ff), out_std)
        attn = parts.self_attention_params(d_model, n_heads, n_kv_heads, init_std, out_std, bias=False)
        return {"norm1": norm(), "attn": attn, "norm2": norm(), "mlp": mlp}

    def normed(p: Params, x: Tensor, par: Par) -> Tensor:
        return rms_norm(x, p["weight"], par, norm_eps)

    def embed(p: Params, batch: Params, par: Par) -> Tensor:
        return nn.dropout(embedding(batch["tokens"], p["weight"], par, vocab=vocab), dropout, par, "embed")

    def attn(p: Params, x: Tensor, par: Par) -> Tensor:
        return parts.self_attention(p, x, par, n_heads=n_heads, n_kv_heads=n_kv_heads, theta=rope_theta)

    def block(p: Params, x: Tensor, par: Par) -> Tensor:
        x = x + nn.dropout(attn(p["attn"], normed(p["norm1"], x, par), par), dropout, par, "attn")
        return x + nn.dropout(swiglu_mlp(p["mlp"], normed(p["norm2"], x, par), par), dropout, par, "mlp")

    def head(p: Params, x: Tensor, par: Par) -> Tensor:
        return parts.token_losses(p["head"], normed(p["norm"], x, par), par, vocab=vocab)

    params = {
        "embed": linear("vocab embed", (vocab, d_model), init_std),
        "blocks": {str(i): block_params() for i in range(n_layers)},
        "norm": norm(),
        "head": linear("vocab embed", (vocab, d_model), init_std),
    }
    return Model(
        params,
        [
            ("embed", "embed", embed),
            *((f"block{i}", f"blocks.{i}", block) for i in range(n_layers)),
            ("head", ["norm", "head"], head),
        ],
        parts.summed,
        parts.token_batch(vocab, seq_len),
    )
