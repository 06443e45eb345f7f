"""A GPT-2-like language model: learned positions, LayerNorm before each half block, GELU."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from functional_par import init, nn
from functional_par.errors import ModelError
from functional_par.model import Model
from functional_par.models import parts
from functional_par.models.parts import Params, linear
from functional_par.nn import embedding, gelu_mlp, layer_norm, sequence_window
from functional_par.par import Par
from functional_par.spec import Param


def gpt(
    vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    seq_len: int,
    d_ff: int | None = None,
    bias: bool = True,
    norm_eps: float = 1e-5,
    init_std: float = 0.02,
    gelu: str = "tanh",
    dropout: float = 0.0,
) -> Model:
    """A GPT-2-like model whose head has a weight of its own; ``fp.tie("head.weight", "embed.weight")`` ties it.

    Args:
        vocab: number of tokens.
        d_model: size of the stream; a multiple of ``n_heads``.
        n_layers: number of blocks.
        n_heads: number of attention heads.
        seq_len: length of the sequences, and number of learned positions.
        d_ff: hidden size of the feed-forward half; by default ``4 * d_model``.
        bias: whether linear layers and norms have biases.
        norm_eps: added to the variance.
        init_std: of the normal initial weights; projections back into the stream get it over ``sqrt(2 * n_layers)``.
        gelu: ``"tanh"``, GPT-2's approximation, or ``"exact"``, which is faster on CPU.
        dropout: rate after the embedding and after the attention and the feed-forward half of each block. It changes no
            parameter: evaluate with the same model made with a rate of 0.

    Raises:
        ModelError: for a size that is not positive, heads that do not divide ``d_model``, another ``gelu``, or a rate outside
            [0, 1).

    >>> model = gpt(vocab=256, d_model=64, n_layers=2, n_heads=4, seq_len=32)
    >>> [layer.name for layer in model.layers]
    ['embed', 'block0', 'block1', 'head']
    """
    d_ff = 4 * d_model if d_ff is None else d_ff
    parts.check_sizes(
        "gpt", vocab=vocab, d_model=d_model, n_layers=n_layers, n_heads=n_heads, seq_len=seq_len, d_ff=d_ff
    )
    parts.check_multiple("gpt", d_model=d_model, n_heads=n_heads)
    if gelu not in ("tanh", "exact"):
        raise ModelError(f"gpt(gelu={gelu!r}): it is 'tanh' or 'exact'.")
    parts.check_rate("gpt", dropout=dropout)
    approximate = "none" if gelu == "exact" else gelu
    out_std = init_std / math.sqrt(2 * n_layers)

    def norm() -> dict[str, Param]:
        leaves = {"weight": Param((d_model,), "embed", init.ones())}
        return leaves | ({"bias": Param((d_model,), "embed", init.zeros())} if bias else {})

    def block_params() -> dict[str, Any]:
        ffn, embed = ("ffn", "embed") if bias else (None, None)
        up = linear("ffn embed", (d_ff, d_model), init_std, bias=ffn)
        down = linear("embed ffn", (d_model, d_ff), out_std, bias=embed)
        attn_params = parts.self_attention_params(d_model, n_heads, None, init_std, out_std, bias=bias)
        return {"norm1": norm(), "attn": attn_params, "norm2": norm(), "mlp": {"up": up, "down": down}}

    def normed(p: Params, x: Tensor, par: Par) -> Tensor:
        return layer_norm(x, p["weight"], p.get("bias"), par, norm_eps)

    def embed(p: Params, batch: Params, par: Par) -> Tensor:
        tokens = batch["tokens"]
        x = embedding(tokens, p["embed"]["weight"], par, vocab=vocab)
        x = x + sequence_window(p["position"]["weight"][: tokens.shape[1]], par, 0)
        return nn.dropout(x, dropout, par, "embed")

    def attn(p: Params, x: Tensor, par: Par) -> Tensor:
        return parts.self_attention(p, x, par, n_heads=n_heads, n_kv_heads=n_heads)

    def mlp(p: Params, x: Tensor, par: Par) -> Tensor:
        return gelu_mlp(p, x, par, approximate=approximate)

    def block(p: Params, x: Tensor, par: Par) -> Tensor:
        x = x + nn.dropout(attn(p["attn"], normed(p["norm1"], x, par), par), dropout, par, "attn")
        return x + nn.dropout(mlp(p["mlp"], normed(p["norm2"], x, par), par), dropout, par, "mlp")

    def head(p: Params, x: Tensor, par: Par) -> Tensor:
        return parts.token_losses(p["head"], normed(p["norm"], x, par), par, vocab=vocab)

    params = {
        "embed": linear("vocab embed", (vocab, d_model), init_std),
        "position": linear("seq embed", (seq_len, d_model), init_std),
        "blocks": {str(i): block_params() for i in range(n_layers)},
        "norm": norm(),
        "head": linear("vocab embed", (vocab, d_model), init_std),
    }
    return Model(
        params,
        [
            ("embed", ["embed", "position"], embed),
            *((f"block{i}", f"blocks.{i}", block) for i in range(n_layers)),
            ("head", ["norm", "head"], head),
        ],
        parts.summed,
        parts.token_batch(vocab, seq_len),
    )
