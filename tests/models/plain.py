"""The two models once more, written straight down in plain torch on flat dicts of parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def heads_attention(p, at, x, group, turn=lambda x: x):
    """Causal attention, one head after another; ``turn`` rotates queries and keys."""
    seq = x.shape[1]
    mask = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
    y = p.get(f"{at}.out.bias", 0)
    for i, wq in enumerate(p[f"{at}.q.weight"]):
        q, k, v = (
            x @ p[f"{at}.{name}.weight"][j].T + (p[f"{at}.{name}.bias"][j] if f"{at}.{name}.bias" in p else 0)
            for name, j in (("q", i), ("k", i // group), ("v", i // group))
        )
        scores = turn(q) @ turn(k).transpose(1, 2) / math.sqrt(wq.shape[0])
        y = y + scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v @ p[f"{at}.out.weight"][:, i].T
    return y


def gelu_tanh(x):
    """GPT-2's approximation."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt_logits(p, tokens, n_layers, gelu=gelu_tanh):
    """GPT-2: learned positions, LayerNorm, gelu."""
    norm = lambda x, at: F.layer_norm(x, x.shape[-1:], p[f"{at}.weight"], p.get(f"{at}.bias"), 1e-5)  # noqa: E731
    x = p["embed.weight"][tokens] + p["position.weight"][: tokens.shape[1]]
    for i in range(n_layers):
        x = x + heads_attention(p, f"blocks.{i}.attn", norm(x, f"blocks.{i}.norm1"), 1)
        h = norm(x, f"blocks.{i}.norm2") @ p[f"blocks.{i}.mlp.up.weight"].T + p.get(f"blocks.{i}.mlp.up.bias", 0)
        x = x + gelu(h) @ p[f"blocks.{i}.mlp.down.weight"].T + p.get(f"blocks.{i}.mlp.down.bias", 0)
    return norm(x, "norm") @ p["head.weight"].T


def llama_logits(p, tokens, n_layers, group, theta):
    """Llama: rotary positions as rotate-half with cosines of the doubled frequencies, RMSNorm, SwiGLU."""

    def norm(x, at):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[f"{at}.weight"]

    def turn(x):
        half = x.shape[-1] // 2
        frequencies = 1 / theta ** (torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).double(), frequencies).repeat(1, 2)
        return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()

    x = p["embed.weight"][tokens]
    for i in range(n_layers):
        x = x + heads_attention(p, f"blocks.{i}.attn", norm(x, f"blocks.{i}.norm1"), group, turn)
        h = norm(x, f"blocks.{i}.norm2")
        mlp = {name: p[f"blocks.{i}.mlp.{name}.weight"] for name in ("gate", "up", "down")}
        g = h @ mlp["gate"].T
        x = x + (g / (1 + torch.exp(-g)) * (h @ mlp["up"].T)) @ mlp["down"].T
    return norm(x, "norm") @ p["head.weight"].T


def mean_loss(logits, labels):
    """Mean cross-entropy over the labels that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
