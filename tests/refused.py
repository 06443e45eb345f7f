"""Layers with one fault each, as a user might write them. The line at fault ends in ``# here``."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F

import functional_par as fp
from functional_par import Model, Param

VOCAB, EMBED, FFN = 8, 4, 8

PARAMS = {
    "table": Param((VOCAB, EMBED), "rows embed"),
    "mlp": {"up": Param((FFN, EMBED), "ffn embed"), "down": Param((EMBED, FFN), "embed ffn")},
    "out": Param((VOCAB, EMBED), "rows embed"),
}


def embed(p, batch, par):
    return p[batch["tokens"]]


def head(p, x, par):
    return x @ p.T


def loss(p, x, par):
    labels = par.batch["labels"]
    return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def right(p, x, par):
    h = torch.tanh(par.pvary(x, "tp") @ p["up"].T)
    return x + par.psum(h @ p["down"].T, "tp")


def missing_psum(p, x, par):
    h = torch.tanh(par.pvary(x, "tp") @ p["up"].T)
    y = h @ p["down"].T
    return x + y  # here


def missing_pvary(p, x, par):
    h = torch.tanh(x @ p["up"].T)  # here
    return x + par.psum(h @ p["down"].T, "tp")


def superfluous_psum(p, x, par):
    h = torch.tanh(par.pvary(x, "tp") @ p["up"].T)
    y = par.psum(h @ p["down"].T, "tp")
    return x + par.psum(y, "tp")  # here


def superfluous_pvary(p, x, par):
    h = torch.tanh(par.pvary(x, "tp") @ p["up"].T)
    return x + par.psum(par.pvary(h, "tp") @ p["down"].T, "tp")  # here


def slice_of_what_differs(p, x, par):
    h = torch.tanh(par.pvary(x, "tp") @ p["up"].T)
    y = par.slice(h @ p["down"].T, "tp", 1)  # here
    return par.all_gather(y, "tp", 1, to="replicated")


def slice_that_does_not_divide(p, x, par):
    longer = torch.cat([x, x[:, :1]], 1)
    y = par.slice(longer, "tp", 1)  # here
    h = torch.tanh(y @ p["up"].T) @ p["down"].T
    return par.all_gather(h, "tp", 1, to="replicated")[:, :-1]


def gather_of_what_is_the_same(p, x, par):
    return x + par.all_gather(x, "tp", 1)[:, : x.shape[1]] + par.psum(p["up"].sum() + p["down"].sum(), "tp")  # here


def in_place(p, x, par):
    x.mul_(2.0)  # here
    return right(p, x, par)


def in_place_through_a_view(p, x, par):
    first = x[:, 0]
    first += 1.0  # here
    return right(p, x, par)


def writes_to_a_parameter(p, x, par):
    p["up"].zero_()  # here
    return right(p, x, par)


def draws(p, x, par):
    noise = torch.rand(x.shape)  # here
    return right(p, x + noise, par)


def drops_out(p, x, par):
    x = F.dropout(x, 0.1)  # here
    return right(p, x, par)


def reads_a_number(p, x, par):
    scale = 1.0 / x.abs().max().item()  # here
    return right(p, x * scale, par)


def branches_on_a_tensor(p, x, par):
    if x.sum() > 0:  # here
        x = -x
    return right(p, x, par)


CLOSED_OVER = torch.ones(EMBED, requires_grad=True)


def closes_over_a_weight(p, x, par):
    return right(p, x * CLOSED_OVER, par)  # here


def asks_for_a_wrong_axis(p, x, par):
    return x + par.psum(p["up"].sum() + p["down"].sum(), "model")  # here


def model(fn):
    """Embedding, the layer in question between two right ones, and a head."""
    layers = [("embed", "table", embed), ("before", "mlp", right), ("mlp", "mlp", fn), ("head", "out", head)]
    return Model(PARAMS, layers, loss)


def program(fn):
    return fp.compose(fp.shard_tp(), fp.dp_reduce(), fp.stage_pp())(model(fn))


def line_of(fn):
    """``file:line`` and code of the line at fault, as a message shows them."""
    lines, start = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"refused.py:{start + offset}", f"`{lines[offset].strip()}`"
