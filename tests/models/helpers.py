"""Parameters and batches for the tests of models."""

from __future__ import annotations

import torch

from functional_par import tree


def noisy(model, seed=0):
    """The model's initial parameters, flat, with noise added, so that no bias is zero and no norm weight one."""
    generator = torch.Generator().manual_seed(seed)
    params = tree.flatten(model.init(seed, torch.float64))
    return {path: x + 0.2 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for path, x in params.items()}


def batch_of(vocab, seq, rows=2, seed=0):
    """Random tokens and labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (rows, seq), generator=generator) for _ in range(2))
    labels[0, 1::3] = -100
    return {"tokens": tokens, "labels": labels}


def close_leaves(actual, expected):
    """max|a-b| <= 1e-10 max(1, max|b|), leaf by leaf."""
    assert actual.keys() == expected.keys()
    for path, want in expected.items():
        limit = 1e-10 * max(1.0, want.abs().max().item())
        assert (actual[path] - want).abs().max().item() <= limit, path
