"""A model of any number of layers that sends between them all that may be sent: activations, skips over many layers, integers
and booleans (made on the way or fields of the batch), a running number; with layers that have no parameters, frozen leaves,
leaves that one layer reads as they are and another through ``fp.nn``, and leaves that several layers read.
"""

from __future__ import annotations

from typing import Any

import torch

import functional_par as fp
from functional_par import Model, Param, init

VOCAB, EMBED = 7, 4
WIDE = init.normal(0.5)


def look_up(p: Any, batch: Any, par: fp.Par) -> Any:
    x = fp.nn.embedding(batch["tokens"], p, par, vocab=VOCAB)
    kept = batch["labels"] != -100
    return {
        "x": x,
        "skip": x.sin(),
        "kept": kept,
        "ids": batch["tokens"],
        "hops": kept.sum(1),
        "aux": (x.square() * kept[..., None]).sum(),
        "count": kept.sum(),
    }


def mix(p: Any, s: Any, par: fp.Par) -> Any:
    return s | {"x": s["x"] + fp.nn.column_linear(s["x"].tanh(), p["w"], par, p["b"])}


def plain(p: Any, s: Any, par: fp.Par) -> Any:
    return s | {"x": (s["x"] @ p).tanh()}


def mask(p: Any, s: Any, par: fp.Par) -> Any:
    # Reads the skip and hands it on as it is.
    return s | {"x": torch.where(s["kept"][..., None], s["x"] + 0.1 * s["skip"], 0.0), "hops": s["hops"] + 1}


def join(p: Any, s: Any, par: fp.Par) -> Any:
    return s | {"x": s["x"] + s["skip"] * p, "skip": s["x"].cos(), "aux": s["aux"] + s["x"].square().sum() * 0.01}


def shift(p: Any, s: Any, par: fp.Par) -> Any:
    return s | {"x": s["x"] * p + (s["ids"] % 3)[..., None] * 0.1}


KINDS = (mix, join, mask, plain, shift)
"""In this order, again and again. ``shift`` has the one frozen leaf."""


def head(p: Any, s: Any, par: fp.Par) -> Any:
    return fp.nn.column_linear(s["x"], p, par) + s["hops"][:, None, None] * 0.01, s["aux"], s["count"]


def loss(p: Any, y: Any, par: fp.Par) -> Any:
    logits, aux, count = y
    labels = par.batch["labels"]
    kept = labels != -100
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(picked * kept).sum() + 0.1 * aux, count


def skipping(layers: int) -> Model:
    """The model with that many layers, the look-up and the head among them; at least two."""
    square = Param((EMBED, EMBED), "out in", WIDE)
    leaves = {
        mix: {"w": square, "b": Param((EMBED,), "out", WIDE)},
        join: Param((EMBED,), "out", init.uniform(0.5, 1.5)),
        plain: square,
        shift: Param((EMBED,), "out", init.uniform(0.5, 1.5), trainable=False),
    }
    params: dict[str, Any] = {"table": Param((VOCAB, EMBED), "vocab in", WIDE)}
    named: list[Any] = [("look_up", "table", look_up)]
    for i in range(layers - 2):
        kind = KINDS[i % len(KINDS)]
        name = f"{kind.__name__}{i}"
        if kind in leaves:
            params[name] = leaves[kind]
        named.append((name, name if kind in leaves else [], kind))
    params["out"] = Param((VOCAB, EMBED), "vocab in", WIDE)
    return Model(params, [*named, ("head", "out", head)], loss)


def ties(layers: int) -> list[tuple[str, ...]]:
    """Leaves that a tie may make one: matrices of one shape, far apart; and the table with the head."""
    names = [f"plain{i}" for i in range(layers - 2) if KINDS[i % len(KINDS)] is plain]
    mixed = [f"mix{i}.w" for i in range(layers - 2) if KINDS[i % len(KINDS)] is mix]
    groups = [("out", "table"), tuple(mixed), tuple(names), (*mixed[:1], *names[-1:])]
    return [group for group in groups if len(group) > 1]
