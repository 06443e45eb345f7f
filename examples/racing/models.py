"""The llama of the benchmark in plain torch, as functions and as a module, with our initial weights; and the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_par as fp
from functional_par.tree import flatten

from .setting import ROWS

Sizes = Mapping[str, int]
NORM_EPS, THETA = 1e-5, 10000.0


def batch_of(sizes: Sizes) -> dict[str, Tensor]:
    """Random tokens and their successors: int64 [rows, seq]."""
    text = torch.randint(sizes["vocab"], (ROWS, sizes["seq_len"] + 1), generator=torch.Generator().manual_seed(0))
    return {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def weights_of(sizes: Sizes) -> dict[str, Tensor]:
    """Our initial weights by dotted path, those of heads as matrices [out, in]."""
    leaves = flatten(fp.models.llama(**sizes).init(0))
    embed = sizes["d_model"]
    return {path: x.reshape(embed, embed) if ".attn." in path else x for path, x in leaves.items()}


def angles_of(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions: [seq, head]."""
    head = sizes["d_model"] // sizes["n_heads"]
    angles = torch.outer(torch.arange(sizes["seq_len"]), THETA ** (-torch.arange(0, head, 2) / head))
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention with rotary positions; q, k, v and the result are [batch, seq, heads * head]."""
    head = cos.shape[-1]

    def heads(y: Tensor) -> Tensor:
        return y.unflatten(-1, (-1, head)).transpose(1, 2)  # batch heads seq head

    def turn(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat([-second, first], -1) * sin

    y = F.scaled_dot_product_attention(turn(heads(q)), turn(heads(k)), heads(v), is_causal=True)
    return y.transpose(1, 2).flatten(-2)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits [batch, seq, vocab]."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_loss(p: Mapping[str, Any], batch: Mapping[str, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """The loss of the whole model, from a nested dict of weights."""
    x = F.embedding(batch["tokens"], p["embed"]["weight"])  # batch seq embed
    shape = x.shape[-1:]
    for block in p["blocks"].values():
        y = F.rms_norm(x, shape, block["norm1"]["weight"], NORM_EPS)
        q, k, v = (F.linear(y, block["attn"][name]["weight"]) for name in "qkv")
        x = x + F.linear(attention(q, k, v, cos, sin), block["attn"]["out"]["weight"])
        y, mlp = F.rms_norm(x, shape, block["norm2"]["weight"], NORM_EPS), block["mlp"]
        hidden = F.silu(F.linear(y, mlp["gate"]["weight"])) * F.linear(y, mlp["up"]["weight"])
        x = x + F.linear(hidden, mlp["down"]["weight"])
    logits = F.linear(F.rms_norm(x, shape, p["norm"]["weight"], NORM_EPS), p["head"]["weight"])
    return mean_loss(logits, batch["labels"])


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        embed = sizes["d_model"]
        self.q, self.k, self.v, self.out = (nn.Linear(embed, embed, bias=False) for _ in range(4))
        cos, sin = angles_of(sizes)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attention(self.q(x), self.k(x), self.v(x), self.cos, self.sin))


class MLP(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        embed, ffn = sizes["d_model"], sizes["d_ff"]
        self.gate, self.up = (nn.Linear(embed, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, embed, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(sizes["d_model"], NORM_EPS) for _ in range(2))
        self.attn, self.mlp = Attention(sizes), MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """Some layers in a row: the first stage embeds tokens, the last returns logits."""

    def __init__(self, sizes: Sizes, blocks: Iterable[int], first: bool = True, last: bool = True) -> None:
        super().__init__()
        embed, vocab = sizes["d_model"], sizes["vocab"]
        self.embed = nn.Embedding(vocab, embed) if first else None
        self.blocks = nn.ModuleDict({str(i): Block(sizes) for i in blocks})
        self.norm = nn.RMSNorm(embed, NORM_EPS) if last else None
        self.head = nn.Linear(embed, vocab, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


@torch.no_grad()
def with_our_weights(module: Llama, weights: Mapping[str, Tensor]) -> Llama:
    """The module with our initial weights."""
    for path, parameter in module.named_parameters():
        parameter.copy_(weights[path])
    return module
