"""Is the backward of a layer that brings an ``autograd.Function`` the derivative of its forward? Both are wrong alike on
every rank, so only finite differences of the single process can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.audit import advice
from functional_par.audit.finding import Finding
from functional_par.audit.forward import make_finding
from functional_par.audit.observe import Case, Single
from functional_par.audit.record import LayerLog, tensors_in
from functional_par.audit.rules import Said
from functional_par.random import key, normal

STEPS = (1e-6, 3e-7, 1e-5)
"""Lengths of the finite differences; a kink between two points spoils one of them, hardly all."""

TOLERANCE = 1e-4
"""Relative error of a central difference in float64 that is taken for rounding."""


def findings(case: Case, single: Single) -> list[Finding]:
    """One for each layer whose Functions are not differentiated rightly; layers of one function are told once."""
    found, told = [], set()
    for layer in case.plan.model.all_layers:
        log = single.logs[layer.name]
        if log.functions and log.arguments is not None and id(layer.fn) not in told:
            worst = min((_error(layer.fn, log, case.seed, step) for step in STEPS), key=lambda pair: pair[0])
            if worst[0] > TOLERANCE:
                told.add(id(layer.fn))
                found.append(_finding(case, layer.name, log, *worst))
    return found


def _finding(case: Case, layer: str, log: LayerLog, error: float, slope: float, pulled: float) -> Finding:
    names = ", ".join(dict.fromkeys(call.name for call in log.functions))
    text = (
        f"The backward of {names} is not the derivative of the forward, in one process already: along a random direction the "
        f"layer changes by {slope:.6g}, its backward says {pulled:.6g}."
    )
    factor = pulled / slope if slope else None
    said = Said("not the derivative", text, advice.DERIVATIVE, "", factor)
    return make_finding(case, layer, said, abs(pulled - slope), str(log.functions[0].place), "cotangent")


def _error(fn: Callable[..., Any], log: LayerLog, seed: int, step: float) -> tuple[float, float, float]:
    """Relative error, slope by differences, slope by the backward: of a random projection along a random direction."""
    params, x, par = log.arguments
    leaves, structure = pytree.tree_flatten((params, x))
    moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    draw = key(seed).fold("derivative").fold(str(step))
    directions = [_normal(leaves[i], draw.fold(i)) for i in moving]

    def project(values: Sequence[Tensor]) -> Tensor:
        own = list(leaves)
        for i, value in zip(moving, values, strict=True):
            own[i] = value
        outputs = [y for y in tensors_in(fn(*pytree.tree_unflatten(own, structure), par)) if y.is_floating_point()]
        weights = [_normal(y, draw.fold(f"out {i}")) for i, y in enumerate(outputs)]
        return torch.stack([(y * w).sum() for y, w in zip(outputs, weights, strict=True)]).sum()

    points = [leaves[i].detach() for i in moving]
    with torch.no_grad():
        ahead, behind = (project([p + s * d for p, d in zip(points, directions, strict=True)]) for s in (step, -step))
    slope = ((ahead - behind) / (2 * step)).item()
    own = [p.clone().requires_grad_() for p in points]
    grads = torch.autograd.grad(project(own), own, allow_unused=True, materialize_grads=True)
    pulled = sum((g * d).sum().item() for g, d in zip(grads, directions, strict=True))
    size = sum(g.norm().item() * d.norm().item() for g, d in zip(grads, directions, strict=True))
    return abs(slope - pulled) / max(abs(slope), abs(pulled), 1e-3 * size, 1e-6), slope, pulled


def _normal(x: Tensor, draw: Any) -> Tensor:
    return normal(draw, torch.arange(x.numel())).view(x.shape).to(x.dtype)
