"""Small models built freely out of layers that a user might write, each right in both modes of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functional_par import init, nn, tree
from functional_par.errors import ModelError
from functional_par.model import Input, Model
from functional_par.nn.stream import to_stream, whole_sequence
from functional_par.par import Par
from functional_par.spec import Param

IGNORED = -100
HEADS, HEAD, FFN = 4, 2, 12
"""Sizes that tp may cut: 4 heads of 2, 12 hidden features."""

INNER, FEATURES = 3, 3
"""Odd sizes that it may not."""

Function = Callable[[Any, Any, Par], Any]


def free_model(
    layers: Sequence[str] = ("mlp",),
    *,
    vocab: int = 5,
    width: int = 4,
    seq: int | None = 2,
    numbers: bool = False,
    table: str = "split",
    tied: bool = False,
    carries: bool = False,
    weighted: bool = False,
    frozen: str = "",
) -> Model:
    """A model of the named layers between an embedding and a head.

    Args:
        layers: keys of ``LAYERS``; ``"again"`` is the first layer once more, with the same leaves.
        vocab: number of tokens; any, since the vocabulary is padded.
        width: of the stream; any, since it is not cut.
        seq: length of the sequences; None leaves it open.
        numbers: a batch of floating-point features and targets and a squared error, in place of tokens and labels.
        table: ``"split"`` over tp, or ``"whole"`` on every rank.
        tied: the head reads the embedding's leaf. It takes ``table="split"`` and tokens.
        carries: ``x`` is a dict, with a skip connection, integers, booleans, and a loss that is summed up on the way.
        weighted: the loss has a parameter of its own.
        frozen: name of a layer whose leaves are not trained.

    >>> model = free_model(["mlp", "attention", "again"], tied=True, weighted=True)
    >>> [layer.name for layer in model.layers]
    ['embed', 'mlp0', 'attention1', 'again2', 'head']
    >>> model.loss.paths
    ('weights',)
    """
    if tied and (numbers or table != "split"):
        raise ModelError(
            "free_model(tied=True): the head and the embedding read one leaf only for tokens in a split table."
        )
    if numbers:
        params: dict[str, Any] = {"embed": _weight("embed feature", width, FEATURES), "head": _weight("embed", width)}
    else:
        dims = f"{'vocab' if table == 'split' else 'ids'} embed"
        params = {"embed": _weight(dims, vocab, width)} | (
            {} if tied else {"head": _weight("vocab embed", vocab, width)}
        )
    found: list[Any] = [("embed", "embed", _entering(_embed(numbers, table, vocab), carries))]
    for i, kind in enumerate(layers):
        first = i if kind != "again" else 0
        make, function = LAYERS[layers[first]]
        if first == i:
            params[f"layer{i}"] = make(width)
        found.append((f"{kind}{i}", f"layer{first}" if params[f"layer{first}"] else [], _carried(function, carries)))
    found.append(("head", "embed" if tied else "head", _leaving(_head_numbers if numbers else _head, carries)))
    loss = _squared if numbers else _cross_entropy(vocab)
    if weighted:
        params["weights"] = _weight("ids", FEATURES if numbers else vocab)
    fields = _number_fields(seq) if numbers else {name: Input((None, seq)) for name in ("tokens", "labels")}
    reads = {"weights": "weights"} if weighted else {}
    count = (lambda batch: torch.tensor(batch["target"].numel())) if numbers else None
    return Model(_freeze(_full(params), frozen), found, (reads, loss), fields, count)


def _weight(dims: str, *shape: int) -> Param:
    return Param(shape, dims, init.normal(0.5))


def _full(params: Mapping[str, Any]) -> dict[str, Any]:
    """Without the entries of layers that have no leaves."""
    return {name: entry for name, entry in params.items() if entry}


def _freeze(params: dict[str, Any], frozen: str) -> dict[str, Any]:
    """The leaves of the layer with this name keep their values."""
    place = f"layer{frozen[-1]}" if frozen[-1:].isdigit() else frozen
    return tree.unflatten(
        {
            path: replace(leaf, trainable=False) if place and f"{path}.".startswith(f"{place}.") else leaf
            for path, leaf in tree.paths(params)
        }
    )


def _number_fields(seq: int | None) -> dict[str, Input]:
    return {"features": Input((None, seq, FEATURES), torch.float32), "target": Input((None, seq), torch.float64)}


def _embed(numbers: bool, table: str, vocab: int) -> Function:
    def whole(p: Any, batch: Any, par: Par) -> Tensor:
        x = batch["features"] @ p.T if numbers else p[batch["tokens"]]
        return par.slice(x, "tp", 1) if par.sequence_split else x

    def split(p: Any, batch: Any, par: Par) -> Tensor:
        return nn.embedding(batch["tokens"], p, par, vocab=vocab)

    return split if table == "split" and not numbers else whole


def _entering(embed: Function, carries: bool) -> Function:
    if not carries:
        return embed

    def entering(p: Any, batch: Any, par: Par) -> dict[str, Tensor]:
        x = embed(p, batch, par)
        ids = batch["tokens"] if "tokens" in batch else par.rows.unsqueeze(1)
        return {"x": x, "skip": x, "ids": ids, "odd": ids % 2 == 1, "sum": _over_sequence(x.square(), par)}

    return entering


def _over_sequence(x: Tensor, par: Par) -> Tensor:
    """The sum of the stream, without dims."""
    return par.psum(x.sum(), "tp") if par.sequence_split else x.sum()


def _carried(function: Function, carries: bool) -> Function:
    if not carries:
        return function
    return lambda p, s, par: s | {"x": function(p, s["x"], par), "sum": s["sum"] + _over_sequence(s["x"].square(), par)}


def _leaving(head: Function, carries: bool) -> Function:
    if not carries:
        return head
    return lambda p, s, par: s | {"x": head(p, s["x"] + s["skip"], par)}


def _head(p: Any, x: Tensor, par: Par) -> Tensor:
    return nn.column_linear(x, p, par)


def _head_numbers(p: Any, x: Tensor, par: Par) -> Tensor:
    return (par.all_gather(x, "tp", 1, to="replicated") if par.sequence_split else x) @ p


def _cross_entropy(vocab: int) -> Function:
    def loss(p: Any, s: Any, par: Par) -> tuple[Tensor, Tensor]:
        labels = par.batch["labels"]
        losses = nn.cross_entropy(_x(s), labels, par, vocab=vocab)
        if "weights" in p:
            losses = losses * p["weights"][labels.clamp(min=0)].exp()
        return losses.sum() + _rest(s, labels != IGNORED), (labels != IGNORED).sum()

    return loss


def _squared(p: Any, s: Any, par: Par) -> tuple[Tensor, int]:
    off = _x(s) - par.batch["target"]
    if "weights" in p:
        off = off * p["weights"].square().sum()
    return off.square().sum() + _rest(s, torch.ones_like(off, dtype=torch.bool)), off.numel()


def _x(s: Any) -> Tensor:
    return s["x"] if isinstance(s, dict) else s


def _rest(s: Any, kept: Tensor) -> Tensor | float:
    """What a carried state adds to the loss: a sum from the way, and a number of integers and booleans."""
    if not isinstance(s, dict):
        return 0.0
    ids = torch.where(s["odd"] & kept, s["ids"], 0).sum().to(s["sum"].dtype)
    return 0.1 * s["sum"] + 0.01 * ids


def _mlp_leaves(width: int) -> dict[str, Any]:
    up = {"weight": _weight("ffn embed", FFN, width), "bias": _weight("ffn", FFN)}
    return {"up": up, "down": {"weight": _weight("embed ffn", width, FFN), "bias": _weight("embed", width)}}


def _plain_leaves(width: int) -> dict[str, Any]:
    return {"up": _weight("ffn embed", FFN, width), "down": _weight("embed ffn", width, FFN)}


def _gated_leaves(width: int) -> dict[str, Any]:
    shapes = {"gate": (FFN, width), "up": (FFN, width), "down": (width, FFN)}
    return {name: {"weight": _weight("embed ffn" if name == "down" else "ffn embed", *s)} for name, s in shapes.items()}


def _partial_leaves(width: int) -> dict[str, Any]:
    return {**_plain_leaves(width), "scale": Param((width,), "embed", init.uniform(0.5, 1.5))}


def _attention_leaves(kv_heads: int) -> Callable[[int], dict[str, Any]]:
    def leaves(width: int) -> dict[str, Any]:
        kv = "kv_heads head embed"
        return {
            "q": _weight("heads head embed", HEADS, HEAD, width),
            "k": _weight(kv, kv_heads, HEAD, width),
            "v": _weight(kv, kv_heads, HEAD, width),
            "scale": Param((HEAD,), "head", init.uniform(0.5, 1.5)),
            "out": _weight("embed heads head", width, HEADS, HEAD),
        }

    return leaves


def _mlp(p: Any, x: Tensor, par: Par) -> Tensor:
    return x + nn.gelu_mlp(p, x, par)


def _plain_mlp(p: Any, x: Tensor, par: Par) -> Tensor:
    return x + nn.row_linear(torch.tanh(nn.column_linear(x, p["up"], par)), p["down"], par)


def _gated_mlp(p: Any, x: Tensor, par: Par) -> Tensor:
    return x + nn.swiglu_mlp(p, x, par)


def _partial_scale(p: Any, x: Tensor, par: Par) -> Tensor:
    """A leaf that is whole on every rank scales partial sums, so it owes tp."""
    hidden = torch.tanh(whole_sequence(x, par, 1) @ p["up"].T)
    return x + to_stream(hidden @ p["down"].T * p["scale"], par, 1)


def _attention(kv_heads: int) -> Function:
    def attention(p: Any, x: Tensor, par: Par) -> Tensor:
        q, k, v = nn.column_linear(x, (p["q"], p["k"], p["v"]), par)
        q, k = nn.rotary(q * p["scale"], par), nn.rotary(k, par)
        return x + nn.row_linear(nn.attention(q, k, v, par, n_heads=HEADS, n_kv_heads=kv_heads), p["out"], par, n_in=2)

    return attention


LAYERS: Mapping[str, tuple[Callable[[int], Any], Function]] = {
    "mlp": (_mlp_leaves, _mlp),
    "plain mlp": (_plain_leaves, _plain_mlp),
    "gated mlp": (_gated_leaves, _gated_mlp),
    "partial scale": (_partial_leaves, _partial_scale),
    "attention": (_attention_leaves(HEADS), _attention(HEADS)),
    "grouped attention": (_attention_leaves(2), _attention(2)),
    "one-head attention": (_attention_leaves(1), _attention(1)),
    "layer norm": (
        lambda width: {"weight": Param((width,), "embed", init.uniform(0.5, 1.5)), "bias": _weight("embed", width)},
        lambda p, x, par: nn.layer_norm(x, p["weight"], p["bias"], par),
    ),
    "rms norm": (
        lambda width: {"weight": Param((width,), "embed", init.uniform(0.5, 1.5))},
        lambda p, x, par: nn.rms_norm(x, p["weight"], par),
    ),
    "dense": (
        lambda width: {"to": _weight("inner embed", INNER, width), "back": _weight("embed inner", width, INNER)},
        lambda p, x, par: x + torch.tanh(x @ p["to"].T) @ p["back"].T,
    ),
    "tanh": (lambda width: {}, lambda p, x, par: torch.tanh(x)),
}
"""Name to its leaves, of a width of the stream, and its function ``stream -> stream``."""
