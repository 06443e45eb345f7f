"""Models as a user would write them: a few plain functions over a nested dict."""

from __future__ import annotations

import torch

import functional_par as fp
from functional_par import Input, Model, Param, init

VOCAB, EMBED, FFN = 11, 6, 8

WIDE = init.normal(0.5)


def small_gpt(vocab=13, blocks=2, seq=4, heads=4):
    """A gpt of a few thousand weights."""
    return fp.models.gpt(vocab, 8, blocks, heads, seq, d_ff=8, init_std=0.2)


def small_llama(vocab=13, blocks=2, seq=4, heads=4, kv_heads=2):
    """A llama of a few thousand weights, with grouped heads."""
    return fp.models.llama(vocab, 8, blocks, heads, seq, n_kv_heads=kv_heads, d_ff=8, init_std=0.2)


def odd(trainable_scale=True):
    """All that a model may do: ``x`` is a dict with a skip connection, integers, booleans and a running auxiliary loss;
    one layer has no parameters, one is read twice; the loss has a parameter; the hidden layer is split over tp."""

    def look_up(p, batch, par):
        x = p["table"][batch["tokens"]]  # [batch, seq, embed]
        kept = batch["labels"] != -100
        return {"x": x, "skip": x, "kept": kept, "ids": batch["tokens"], "aux": (x.square() * kept[..., None]).sum()}

    def mask(p, s, par):
        assert p == {}
        return s | {"x": torch.where(s["kept"][..., None], s["x"], 0.0)}

    def hidden(p, s, par):
        h = torch.tanh(par.pvary(s["x"], "tp") @ p["up"].T)
        return s | {"x": par.psum(h @ p["down"].T, "tp")}

    def join(p, s, par):
        return {"x": s["x"] + s["skip"] * p, "shift": s["ids"] % 3, "aux": s["aux"]}

    def head(p, s, par):
        return {"y": s["x"] @ p["out"].T, "shift": s["shift"].to(s["x"].dtype), "aux": s["aux"]}

    def loss(p, s, par):
        labels = par.batch["labels"]
        kept = labels != -100
        y = s["y"] - s["shift"][..., None] * p["temperature"]
        picked = y.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return -(picked * kept).sum() + 0.1 * s["aux"], kept.sum()

    params = {
        "table": Param((VOCAB, EMBED), "ids embed", WIDE),
        "mlp": {"up": Param((FFN, EMBED), "ffn embed", WIDE), "down": Param((EMBED, FFN), "embed ffn", WIDE)},
        "scale": Param((EMBED,), "embed", init.uniform(0.5, 1.5), trainable=trainable_scale),
        "out": Param((VOCAB, EMBED), "ids embed", WIDE),
        "temperature": Param((VOCAB,), "ids", WIDE),
    }
    layers = [
        ("look_up", ["table"], look_up),
        ("mask", [], mask),
        ("hidden0", "mlp", hidden),
        ("join", "scale", join),
        ("head", {"out": "out"}, head),
    ]
    return Model(params, layers, ({"temperature": "temperature"}, loss))


def regression(width=6, dtype=torch.float64):
    """Floating-point fields, a count of rows, two layers."""

    def first(p, batch, par):
        return torch.tanh(batch["x"] @ p["w"].T + p["b"])

    def second(p, x, par):
        return x @ p

    def loss(p, x, par):
        return (x - par.batch["y"]).square().sum(), torch.tensor(len(x))

    params = {
        "first": {"w": Param((width, 3), "out in", WIDE), "b": Param((width,), "out", WIDE)},
        "second": Param((width,), "out", WIDE),
    }
    batch = {"x": Input((None, 3), dtype), "y": Input((None,), dtype)}
    return Model(params, [("first", "first", first), ("second", "second", second)], loss, batch)
