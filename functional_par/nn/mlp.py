"""Feed-forward blocks: a column linear, a nonlinearity, a row linear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from functional_par.nn.linear import column_linear, row_linear
from functional_par.par import Par


def gelu_mlp(params: Mapping[str, Any], x: Tensor, par: Par, *, approximate: str = "tanh") -> Tensor:
    """``down(gelu(up(x)))`` as in GPT-2. ``stream -> stream``.

    Args:
        params: {"up": {"weight": [ffn, embed], "bias": [ffn]}, "down": {"weight": [embed, ffn], "bias": [embed]}},
            ffn split over tp; biases may be left out.
        x: [batch, seq, embed].
        approximate: ``"tanh"`` (GPT-2's) or ``"none"`` (exact).
    """
    up, down = params["up"], params["down"]
    hidden = column_linear(x, up["weight"], par, up.get("bias"))
    return row_linear(F.gelu(hidden, approximate=approximate), down["weight"], par, down.get("bias"))


def swiglu_mlp(params: Mapping[str, Any], x: Tensor, par: Par) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202). ``stream -> stream``. Gate and up share one entry.

    Args:
        params: {"gate": {"weight": [ffn, embed]}, "up": {"weight": [ffn, embed]}, "down": {"weight": [embed, ffn]}},
            ffn split over tp; each may have a bias.
        x: [batch, seq, embed].
    """
    gate, up, down = params["gate"], params["up"], params["down"]
    g, u = column_linear(x, (gate["weight"], up["weight"]), par, (gate.get("bias"), up.get("bias")))
    return row_linear(F.silu(g) * u, down["weight"], par, down.get("bias"))
