"""One process that knows of no layouts: plain autograd and torch's optimizers, on the model as written, with ties made by
summing the gradients of the tied names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import functional_par as fp
from functional_par import tree

from ..oracle import gradients, norm_of

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Optimizer:
    """The same optimizer twice: the library's and torch's.

    Attributes:
        slots: the library's name of each moment to torch's.
    """

    name: str
    ours: Callable[[], fp.optim.Optimizer]
    torchs: Callable[[list[Tensor]], Any]
    slots: Mapping[str, str]


OPTIMIZERS = {
    "adamw": Optimizer(
        "adamw",
        lambda: fp.optim.adamw(1e-2, (0.8, 0.9), 1e-6, 0.1),
        lambda leaves: torch.optim.AdamW(leaves, 1e-2, (0.8, 0.9), 1e-6, weight_decay=0.1, foreach=False),
        {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"},
    ),
    "momentum": Optimizer(
        "momentum",
        lambda: fp.optim.sgd(0.05, momentum=0.9, weight_decay=0.01),
        lambda leaves: torch.optim.SGD(leaves, 0.05, 0.9, weight_decay=0.01, foreach=False),
        {"momentum": "momentum_buffer"},
    ),
    "nesterov": Optimizer(
        "nesterov",
        lambda: fp.optim.sgd(0.05, momentum=0.7, nesterov=True),
        lambda leaves: torch.optim.SGD(leaves, 0.05, 0.7, nesterov=True, foreach=False),
        {"momentum": "momentum_buffer"},
    ),
    "sgd": Optimizer("sgd", lambda: fp.optim.sgd(0.1), lambda leaves: torch.optim.SGD(leaves, 0.1, foreach=False), {}),
}


@dataclass
class Trained:
    """What some steps gave; weights and moments are whole, by path, under every name of the model as written."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    slots: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def train(
    model: fp.Model,
    batches: Sequence[Batch],
    optimizer: str,
    ties: Sequence[Sequence[str]] = (),
    clip: float | None = None,
    norm: float = 2.0,
    seed: int = 0,
) -> Trained:
    """Train the model as written, its tied names starting from the value of the first in the order of the layers and kept
    equal by the sum of their gradients, which the norm counts once."""
    first = representatives(model, ties)
    start = tree.flatten(model.init(seed, torch.float64))
    params = {path: start[first[path]].clone().requires_grad_() for path in start}
    kind = OPTIMIZERS[optimizer]
    stepper = kind.torchs(list(params.values()))
    out = Trained()
    for batch in batches:
        loss, grads = gradients(model, params, batch)
        summed: dict[str, Tensor] = {}
        for path, grad in grads.items():
            summed[first[path]] = summed[first[path]] + grad if first[path] in summed else grad
        out.losses.append(loss.item())
        out.norms.append(norm_of(summed, norm))
        out.tokens.append(int(model.count_terms(batch)))
        factor = 1.0 if clip is None else min(1.0, clip / (out.norms[-1] + 1e-6))
        for path, x in params.items():
            x.grad = summed[first[path]] * factor
        stepper.step()
    out.weights = {path: x.detach() for path, x in params.items()}
    out.slots = {
        ours: {path: stepper.state[x][theirs] for path, x in params.items()} for ours, theirs in kind.slots.items()
    }
    return out


def representatives(model: fp.Model, ties: Sequence[Sequence[str]]) -> dict[str, str]:
    """Each path to the path of its class that an earlier layer reads."""
    order = list(dict.fromkeys(path for layer in model.all_layers for path in layer.paths))
    return {path: min(next((t for t in ties if path in t), [path]), key=order.index) for path in order}
