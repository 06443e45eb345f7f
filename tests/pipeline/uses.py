"""A model whose leaves are used in every way: captured by ``fp.nn``, differentiated as usual, both, or neither."""

from __future__ import annotations

from functools import partial

import torch

import functional_par as fp
from functional_par import Model, Param, init
from functional_par.nn import column_linear, embedding, row_linear
from functional_par.pipeline.schedule import Schedule

VOCAB, EMBED, HEADS = 7, 4, 2
WIDE = init.normal(0.5)

HIDDEN = {
    "entry": {"table": 1},
    "enter": {"w": 1, "b": 1},
    "body": {
        "captured": 1,
        "bias": 1,
        "free_bias": 1,
        "view": 1,
        "view_bias": 1,
        "back": 1,
        "twice": 2,
        "left": 1,
        "right": 1,
    },
    "tied": {"w": 1},
    "plain": {},
    "nested": {},
    "loss": {},
}
"""By layer the leaves that are captured and nothing else, and how often."""


def entry(p, batch, par):
    return embedding(batch["tokens"], p["table"], par, vocab=VOCAB) + p["position"]


def enter(p, x, par):
    """Reads the batch through a weight: nothing but the weight is differentiated there."""
    mask = torch.nn.functional.one_hot(par.batch["tokens"], VOCAB).to(x.dtype)
    return x + column_linear(mask, p["w"], par, p["b"])


def body(p, x, par):
    x = x + column_linear(x, p["captured"], par, p["bias"]).tanh()
    x = x + column_linear(x, p["frozen"], par, p["free_bias"]).tanh() + (x @ p["ordinary"]).tanh()
    x = x + 0.5 * column_linear(x, p["both"], par) + (x @ p["both"]).sin()
    x = x + column_linear(column_linear(x, p["twice"], par).tanh(), p["twice"], par)
    x = x + row_linear(column_linear(x, p["view"], par, p["view_bias"]), p["back"], par, n_in=2)
    left, right = column_linear(x, (p["left"], p["right"]), par)
    x = x + left.sin() * right + column_linear(x, p["sliced"][1:], par)
    return x + column_linear(x, p["scaled"] * 0.5, par) + column_linear(x.detach(), p["captured_no_more"].T, par)


def tied(p, x, par):
    return x + column_linear(x.sin(), p["w"], par)


def plain(p, x, par):
    return x + (x.cos() @ p["w"].T)


def nested(p, x, par):
    """Transforms of its own around ``fp.nn``."""

    def energy(w, v):
        return column_linear(v, w, par).tanh().square().sum()

    force = torch.func.grad(partial(energy, p["force"]))(x)
    one = torch.ones(1, 1, EMBED, dtype=x.dtype)
    constant = torch.func.grad(partial(energy, p["constant"]))(one)
    step = torch.func.grad(energy)(p["step"], one)
    rows = torch.func.vmap(lambda row: column_linear(row, p["rows"], par))(x.unsqueeze(2))
    return x + 0.1 * force + 0.1 * constant + x @ step + rows.squeeze(2)


def loss(p, x, par):
    labels = par.batch["labels"]
    kept = labels != -100
    logits = (x * p["scale"]) @ p["out"].T
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(picked * kept).sum(), kept.sum()


def every_use():
    """The model. ``body.ordinary`` is the weight of the two last layers but one, too."""
    square, row = Param((EMBED, EMBED), "out in", WIDE), Param((EMBED,), "out", WIDE)
    names = ("captured", "ordinary", "both", "twice", "left", "right", "scaled", "captured_no_more")
    params = {
        "entry": {"table": Param((VOCAB, EMBED), "vocab embed", WIDE), "position": row},
        "enter": {"w": Param((EMBED, VOCAB), "out ids", WIDE), "b": row},
        "body": {
            **dict.fromkeys(names, square),
            "bias": row,
            "free_bias": row,
            "frozen": Param((EMBED, EMBED), "out in", WIDE, trainable=False),
            "view": Param((HEADS, EMBED, EMBED), "parts out in", WIDE),
            "view_bias": Param((HEADS, EMBED), "parts out", WIDE),
            "back": Param((EMBED, HEADS, EMBED), "out parts in", WIDE),
            "sliced": Param((EMBED + 1, EMBED), "more in", WIDE),
        },
        "nested": dict.fromkeys(("force", "constant", "step", "rows"), square),
        "loss": {"scale": row, "out": Param((VOCAB, EMBED), "ids embed", WIDE)},
    }
    layers = [
        ("entry", "entry", entry),
        ("enter", "enter", enter),
        ("body", "body", body),
        ("tied", {"w": "body.ordinary"}, tied),
        ("plain", {"w": "body.ordinary"}, plain),
        ("nested", "nested", nested),
    ]
    return Model(params, layers, ("loss", loss))


def rows_of(kind, microbatches):
    """A schedule of one rank: whole backwards, or halves with the weights at once, late, or between other microbatches."""
    m = range(microbatches)
    if kind == "whole":
        return [[f"0{action}{i}" for i in m for action in "FB"]]
    if kind == "halves":
        return [[f"0{action}{i}" for i in m for action in "FIW"]]
    if kind == "late":
        return [[*(f"0F{i}" for i in m), *(f"0I{i}" for i in m), *(f"0W{i}" for i in m)]]
    if kind == "any order":
        return [[*(f"0F{i}" for i in m), *(f"0I{i}" for i in m), *(f"0W{i}" for i in reversed(m))]]
    return [[f"0{a}{i + d}" for i in range(-1, microbatches) for a, d in (("F", 1), ("I", 1), ("W", 0)) if i + d in m]]


def by(kind, microbatches):
    """``stage_pp`` with that schedule."""
    # A function that makes one is not called for one rank, where plain accumulation takes its place.
    return fp.stage_pp(Schedule.of(kind, rows_of(kind, microbatches)), microbatches)
