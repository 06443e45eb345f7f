"""The single process that every layout must equal: plain torch.autograd.grad, torch.optim.AdamW or SGD, and a clip by
hand, in float64. Nothing of the step, the schedule, the reduction or the optimizers of the library is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import functional_par as fp
from functional_par import tree

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
"""Of AdamW, here and on the ranks."""

TOLERANCE = 1e-10


@dataclass
class Run:
    """What some steps gave: a number a step, and the whole weights at the end, by dotted path."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def adamw() -> Any:
    """The library's optimizer with the oracle's numbers."""
    return fp.optim.adamw(LR, BETAS, EPS, DECAY)


def gradients(model: fp.Model, params: dict[str, Tensor], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss of a batch, and its gradient by every trainable leaf."""
    leaves = {path: x.detach().requires_grad_(model.leaves[path].trainable) for path, x in params.items()}
    loss = model(tree.unflatten(leaves), batch)
    wanted = {path: x for path, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(wanted, found, strict=True))


def norm_of(grads: dict[str, Tensor], order: float = 2.0) -> float:
    """Norm of all gradients as one vector."""
    return torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads.values()]), order).item()


def train(
    model: fp.Model,
    batches: Sequence[dict[str, Tensor]],
    *,
    clip: float | None = None,
    norm: float = 2.0,
    seed: int = 0,
    sgd: float | None = None,
) -> Run:
    """A step of AdamW (or of SGD with the learning rate ``sgd``) on each batch, from ``model.init(seed)``."""
    params = {path: x.clone() for path, x in tree.flatten(model.init(seed, torch.float64)).items()}
    moving = [x.requires_grad_() for path, x in params.items() if model.leaves[path].trainable]
    if sgd is None:
        optimizer: Any = torch.optim.AdamW(moving, LR, BETAS, EPS, weight_decay=DECAY, foreach=False)
    else:
        optimizer = torch.optim.SGD(moving, sgd, foreach=False)
    out = Run()
    for batch in batches:
        loss, grads = gradients(model, params, batch)
        out.losses.append(loss.item())
        out.norms.append(norm_of(grads, norm))
        out.tokens.append(int(model.count_terms(batch)))
        factor = 1.0 if clip is None else min(1.0, clip / (out.norms[-1] + 1e-6))
        for path, grad in grads.items():
            params[path].grad = grad * factor
        optimizer.step()
    out.weights = {path: x.detach() for path, x in params.items()}
    return out


def close(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """max|a-b| <= 1e-10 max(1, max|b|)"""
    assert actual.shape == expected.shape, what
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    worst = (actual - expected).abs().max().item()
    assert worst <= limit, f"{what}: {worst} > {limit}"


def equal_runs(actual: Run, expected: Run) -> None:
    """Losses, norms, tokens and each leaf agree to the tolerance."""
    assert actual.tokens == expected.tokens
    for name in ("losses", "norms"):
        a, b = (torch.tensor(getattr(run, name), dtype=torch.float64) for run in (actual, expected))
        close(a, b, name)
    assert actual.weights.keys() == expected.weights.keys()
    for path, want in expected.weights.items():
        close(actual.weights[path], want, path)


def same_bits(actual: Run, expected: Run) -> None:
    """Losses, norms, tokens and each leaf agree in every bit."""
    assert (actual.losses, actual.norms, actual.tokens) == (expected.losses, expected.norms, expected.tokens)
    assert actual.weights.keys() == expected.weights.keys()
    for path, want in expected.weights.items():
        assert torch.equal(actual.weights[path], want), path


@dataclass
class Ranks:
    """What a program did on the ranks of a mesh.

    Attributes:
        run: losses, norms and whole weights, the names of tied leaves included.
        states: the last state of each rank.
        records: what each rank communicated.
        trail: parameters of each rank, by path, after each step.
    """

    run: Run
    states: list[fp.State]
    records: list[Any]
    trail: list[list[dict[str, Tensor]]]


def train_on(
    program: fp.Program,
    mesh: fp.Mesh,
    batches: Sequence[Any],
    optimizer: Any = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Ranks:
    """The same on the ranks of a mesh, as threads. Metrics must be the same on every rank."""

    def main(world: Any) -> Any:
        step = program.step(world, optimizer or adamw(), dtype=dtype, **options)
        state = step.init(seed)
        seen, trail = [], []
        for batch in batches:
            state, metrics = step(state, batch)
            seen.append((metrics["loss"], metrics["grad_norm"], metrics["tokens"], metrics["lr"]))
            trail.append({path: x.clone() for path, x in state.flat.items()})
        return state, seen, world.record, trail

    states, seen, records, trail = zip(*fp.run(main, mesh, backend="threads", timeout=120.0), strict=True)
    for other in seen[1:]:
        assert other == seen[0], "metrics differ between ranks"
    whole = tree.flatten(fp.unshard([state.params for state in states], program.plan(mesh)))
    losses, norms, tokens, _ = zip(*seen[0], strict=True)
    return Ranks(Run(list(losses), list(norms), list(tokens), whole), list(states), list(records), list(trail))


def untie(weights: dict[str, Tensor], plan: fp.Plan) -> dict[str, Tensor]:
    """The weights of the tied model under all names of the model as written."""
    return {name: weights[plan.aliases.get(name, name)] for name in plan.source.leaves}


def token_batch(vocab: int, rows: int, seq: int, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens and labels. Ignored labels are spread unevenly: the more rows have passed, the fewer; one row has
    none left."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (rows, seq), generator=generator) for _ in range(2))
    kept = torch.rand(rows, seq, generator=generator) < torch.linspace(0.2, 1.0, rows).unsqueeze(1)
    labels[~kept] = -100
    labels[rows // 3] = -100
    return {"tokens": tokens, "labels": labels}
