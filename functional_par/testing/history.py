"""What some steps of training gave, whole: in one process by a plain loop, or on the ranks of a mesh as threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from functional_par import tree
from functional_par.bucket import Slice
from functional_par.buckets import slices
from functional_par.comm.base import World
from functional_par.mesh import Mesh
from functional_par.model import Model
from functional_par.optim import Optimizer
from functional_par.plan import Plan
from functional_par.program import Program
from functional_par.run import run
from functional_par.run_par import RunPar, step_key
from functional_par.shards import cut, parameter_slices, place
from functional_par.state import State
from functional_par.testing.batch import fields_of

Flat = dict[str, Tensor]
Batches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Training:
    """How to train, beside the layout.

    Attributes:
        optimizer: from ``fp.optim``; None computes gradients and moves nothing.
        clip, norm: of the global gradient, as ``program.step`` takes them.
        seed: of the initial parameters.
        engine, donate: as ``program.step`` takes them; they mean nothing in one process.
    """

    optimizer: Optimizer | None = None
    clip: float | None = None
    norm: float = 2.0
    seed: int = 0
    engine: str = "func"
    donate: bool = False

    @property
    def moves(self) -> Optimizer:
        return _still() if self.optimizer is None else self.optimizer


@dataclass(frozen=True)
class Moment:
    """One step.

    Attributes:
        loss, norm, tokens: the metrics; ``norm`` is before clipping.
        grads: of each trainable leaf, whole, as the optimizer gets it: after clipping.
    """

    loss: float
    norm: float
    tokens: int
    grads: Flat


@dataclass(frozen=True)
class History:
    """All steps, and what is left after the last.

    Attributes:
        moments: one a step.
        params: leaf path to whole value.
        opt: slot of the optimizer, then leaf path, to whole value.
        copies: what is not the same on all ranks that hold it, in words; of one process nothing.
    """

    moments: tuple[Moment, ...]
    params: Flat
    opt: dict[str, Flat]
    copies: tuple[str, ...] = ()


def plainly(model: Model, batches: Batches, how: Training) -> History:
    """Train the plain function in one process, in float64. Nothing of a step, schedule or reduction is used."""
    flat = tree.flatten(model.init(how.seed, dtype=torch.float64))
    trained = {path: x for path, x in flat.items() if model.leaves[path].trainable}
    slots: Any = how.moves.init(trained)
    moments = []
    for i, batch in enumerate(batches):
        loss, grads = gradients(model, {**flat, **trained}, batch, how.seed, i)
        norm = torch.linalg.vector_norm(torch.cat([torch.zeros(1), *(g.flatten() for g in grads.values())]), how.norm)
        if how.clip is not None and (factor := how.clip / (norm.item() + 1e-6)) < 1.0:
            grads = {path: grad * factor for path, grad in grads.items()}
        moments.append(Moment(loss.item(), norm.item(), int(model.count_terms(batch)), grads))
        trained, slots = how.moves.update(grads, slots, trained, i, inplace=False)
    return History(tuple(moments), {**flat, **trained}, slots)


def gradients(
    model: Model, params: Mapping[str, Tensor], batch: Mapping[str, Tensor], seed: int = 0, step: int = 0
) -> tuple[Tensor, Flat]:
    """Mean loss of one batch and its gradient by each trainable leaf, by ``torch.autograd.grad`` alone."""
    leaves = {path: x.detach().requires_grad_(model.leaves[path].trainable) for path, x in params.items()}
    wide = fields_of(batch)
    loss = model(tree.unflatten(leaves), wide, RunPar(batch=wide, key=step_key(seed, step)))
    wanted = {path: x for path, x in leaves.items() if x.requires_grad}
    if not (wanted and loss.requires_grad):
        return loss.detach(), {path: torch.zeros_like(x) for path, x in wanted.items()}
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(wanted, found, strict=True))


def on_ranks(program: Program, mesh: Mesh, batches: Batches, how: Training) -> History:
    """Train a program on the ranks of a mesh, as threads, in float64."""
    plan = program.plan(mesh)
    wide = [fields_of(batch) for batch in batches]
    results = run(lambda world: _rank(program, world, wide, how), mesh, backend="threads")
    metrics, grads, states = zip(*results, strict=True)
    copies = [
        f"metrics of rank {i}: {other}, of rank 0: {metrics[0]}"
        for i, other in enumerate(metrics)
        if other != metrics[0]
    ]
    own = [slices(plan, rank) for rank in range(mesh.size)]
    moments = []
    for i, (loss, norm, tokens) in enumerate(metrics[0]):
        whole = join(plan, [each[i] for each in grads], own, f"gradient of step {i + 1}", copies)
        moments.append(Moment(loss, norm, tokens, whole))
    params, opt = join_states(plan, states, copies)
    return History(tuple(moments), params, opt, tuple(copies))


def _rank(program: Program, world: World, batches: Batches, how: Training) -> Any:
    grads: list[dict[str, Tensor]] = []
    step = program.step(
        world,
        witness(how.moves, grads),
        how.clip,
        how.norm,
        donate=how.donate,
        dtype=torch.float64,
        engine=how.engine,
    )
    state, metrics = step.init(how.seed), []
    for batch in batches:
        grads.append({})
        state, found = step(state, batch)
        metrics.append((found["loss"], found["grad_norm"], found["tokens"]))
    return metrics, grads, state


def witness(optimizer: Optimizer, seen: list[dict[str, Tensor]]) -> Optimizer:
    """The optimizer, which adds the gradients that it gets, maybe of some leaves at a time, to the last of ``seen``."""

    def update(grads: Any, slots: Any, params: Any, step: int, *, inplace: bool) -> Any:
        seen[-1].update((path, grad.clone()) for path, grad in grads.items())
        return optimizer.update(grads, slots, params, step, inplace=inplace)

    return replace(optimizer, update=update)


def join_states(plan: Plan, states: Sequence[State], copies: list[str]) -> tuple[Flat, dict[str, Flat]]:
    """Whole parameters and optimizer state; see ``join``."""
    ranks = range(plan.mesh.size)
    held, own = [parameter_slices(plan, rank) for rank in ranks], [slices(plan, rank) for rank in ranks]
    params = join(plan, [state.flat for state in states], held, "parameter", copies)
    slots = {slot: [state.flat_opt[slot] for state in states] for slot in states[0].flat_opt}
    return params, {slot: join(plan, parts, own, slot, copies) for slot, parts in slots.items()}


def join(
    plan: Plan, parts: Sequence[Mapping[str, Tensor]], own: Sequence[Mapping[str, Slice]], what: str, copies: list[str]
) -> Flat:
    """Whole leaves from the shards of all ranks, or from their ``own`` slices of them. Whatever a rank holds that is not its
    part of the whole, bit for bit, is told to ``copies``."""
    whole = {}
    for path in dict.fromkeys(path for part in parts for path in part):
        spec, ranks = plan.specs[path], [rank for rank, part in enumerate(parts) if path in part]
        whole[path] = parts[ranks[0]][path].new_zeros(spec.shape)
        held = {rank: own[rank].get(path) for rank in ranks}
        for rank, piece in held.items():
            if spec.counted_by(plan.mesh.coords(rank), piece.axes if piece else ()):
                place(plan, spec, whole[path], parts[rank][path], rank, piece)
        for rank, piece in held.items():
            mine, same = parts[rank][path], cut(plan, spec, whole[path], rank)
            same = piece.of(same) if piece else same
            if not torch.equal(mine, same):
                far = (mine - same).abs().max().item()
                copies.append(f"{what} {path}: the copy of rank {rank} is off by {far:.3g} from the others")
    return {path: whole[path] for path in plan.specs if path in whole}


def _still() -> Optimizer:
    """Moves nothing."""

    def update(grads: Any, slots: Any, params: Any, step: int, *, inplace: bool) -> Any:
        return dict(params), {}

    return Optimizer("none", (), lambda params: {}, update, lambda step: 0.0)
