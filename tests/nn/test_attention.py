from __future__ import annotations

import math
import re

import pytest
import torch

from functional_par.errors import ModelError
from functional_par.nn import attention
from functional_par.run_par import RunPar

from .ranks import calls, close, on_ranks, tensors


def plain(q, k, v, causal=True):
    """Head by head, with an explicit mask and softmax."""
    seq, group = q.shape[1], q.shape[2] // k.shape[2]
    mask = torch.ones(seq, seq, dtype=torch.bool).tril() if causal else torch.ones(seq, seq, dtype=torch.bool)
    outs = []
    for i in range(q.shape[2]):
        scores = q[:, :, i] @ k[:, :, i // group].transpose(1, 2) / math.sqrt(q.shape[-1])
        outs.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, :, i // group])
    return torch.stack(outs, 2)


def test_attention_may_look_ahead():
    q, k, v = tensors((2, 7, 4, 4), (2, 7, 2, 4), (2, 7, 2, 4))
    close(attention(q, k, v, RunPar(), n_heads=4, n_kv_heads=2, causal=False), plain(q, k, v, causal=False))


def test_attention_makes_no_call():
    q, k, v = tensors((1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 2, 4))

    def main(par, rank):
        torch.func.vjp(lambda q: attention(q, k, v, par, n_heads=6, n_kv_heads=2), q)[1](q)
        return calls(par)

    assert on_ranks(3, main) == [{}] * 3


def test_heads_that_do_not_divide_are_errors_with_the_numbers():
    q, k = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match=re.escape("n_heads=4 is not a multiple of n_kv_heads=3")):
        attention(q, k, k, RunPar(), n_heads=4, n_kv_heads=3)
    with pytest.raises(ModelError, match=re.escape("n_heads=4 cannot be split over tp=3: choose a tp that divides")):
        on_ranks(3, lambda par, rank: attention(q, q, q, par, n_heads=4, n_kv_heads=4))
    message = "n_kv_heads=2 over tp=1 are 4 query and 2 key/value heads a rank, but q, k, v have 4, 3, 3."
    with pytest.raises(ModelError, match=re.escape(message)):
        attention(q, k, k, RunPar(), n_heads=4, n_kv_heads=2)
