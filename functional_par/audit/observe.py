"""Runs the program twice on the same parameters and batch: in one process by plain autograd, and on the ranks of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from functional_par import optim, tree
from functional_par.audit.instrument import instrument, instrument_plan
from functional_par.audit.layout import Grid
from functional_par.audit.record import LayerLog, Recorder
from functional_par.comm.base import World
from functional_par.errors import NonFiniteError
from functional_par.plan import Plan
from functional_par.run import run
from functional_par.run_par import RunPar, step_key
from functional_par.step import Step

Flat = Mapping[str, Tensor]


def _always(axis: str) -> bool:
    return True


@dataclass(frozen=True)
class Case:
    """What is run.

    Attributes:
        plan: of the program on the mesh.
        params: whole leaves by path, float64.
        batch: the global batch.
        seed: of the step's random numbers.
        guilty: whether the program goes wrong along one axis alone (``"microbatches"`` is one); it may take a run to know.
    """

    plan: Plan
    params: Flat
    batch: Flat
    seed: int
    guilty: Callable[[str], bool] = _always

    @property
    def pieces(self) -> int:
        """Into how many pieces of equal rows the batch is cut."""
        return self.plan.pieces

    @property
    def rows(self) -> int:
        """Rows in the whole batch."""
        return len(next(iter(self.batch.values())))


@dataclass(frozen=True)
class Single:
    """The single process: the mean loss, gradients by path, and a log a layer."""

    loss: Tensor
    grads: Flat
    logs: Mapping[str, LayerLog]


@dataclass(frozen=True)
class Ranks:
    """The ranks: the loss, gradients after all sums by rank and path, and ``logs[layer][piece][tp]``. Where the loss or the
    gradient norm is not a finite number the loss is not a number, and there are no gradients."""

    loss: Tensor
    grads: tuple[Flat, ...]
    logs: Mapping[str, tuple[tuple[LayerLog, ...], ...]]


def single(case: Case, deep: frozenset[str] = frozenset()) -> Single:
    """The plain function, kernels by their definitions.

    Raises:
        NonFiniteError: its loss is not a finite number.
    """
    plan, recorder = case.plan, Recorder(deep, keeps_arguments=True)
    model = instrument(plan.model, recorder)
    par = RunPar(batch=case.batch, mode=plan.mode, fast=False, key=step_key(case.seed, 0))
    leaves = {p: x.clone().requires_grad_(model.leaves[p].trainable) for p, x in case.params.items()}
    loss = model(tree.unflatten(leaves), case.batch, par)
    if not loss.isfinite():
        raise NonFiniteError(
            f"audit: in one process the mean loss is {loss.item()}, so there is nothing to compare with. Pass batch=... with "
            "values that the model is made for."
        )
    wanted = {path: x for path, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    logs = {layer: log for (layer, _), log in recorder.logs.items()}
    return Single(loss.detach(), dict(zip(wanted, grads, strict=True)), logs)


def ranks(case: Case, deep: frozenset[str] = frozenset(), fast: bool = True) -> Ranks:
    """The program on the ranks, as threads. With plain gradient descent at rate 1 a step takes off each leaf its gradient."""
    plan, mesh = case.plan, case.plan.mesh
    shapes = {n: ((case.rows // case.pieces, *x.shape[1:]), x.dtype) for n, x in case.batch.items()}
    plan.trace()
    plan.trace(shapes, torch.float64)  # once, for all ranks
    recorders = [Recorder(deep) for _ in range(mesh.size)]
    whole = tree.unflatten(case.params)

    def main(world: World) -> tuple[float, Flat]:
        own = replace(instrument_plan(plan, recorders[world.rank]), precision=None)  # the function, not its roundings
        step = Step(own, world, optim.sgd(lr=1.0), dtype=torch.float64, engine="tape")
        step.par = replace(step.par, fast=fast)
        state = step.load(whole, seed=case.seed)
        try:
            after, metrics = step(state, case.batch)
        except NonFiniteError:  # on all ranks alike; what they recorded tells where
            return math.nan, {}
        before, moved = state.flat, after.flat
        return metrics["loss"], {p: before[p] - moved[p] for p in before if plan.specs[p].trainable}

    results = run(main, mesh, backend="threads")
    logs = {layer.name: _grid(case, recorders, layer.name) for layer in plan.model.all_layers}
    return Ranks(torch.tensor(results[0][0], dtype=torch.float64), tuple(grads for _, grads in results), logs)


def _grid(case: Case, recorders: list[Recorder], layer: str) -> tuple[tuple[LayerLog, ...], ...]:
    """The logs of one layer, by piece of the batch and tp."""
    plan, each = case.plan, case.rows // case.pieces
    grid: list[list[LayerLog]] = [[LayerLog()] * plan.mesh.tp for _ in range(case.pieces)]
    for rank, recorder in enumerate(recorders):
        coords = plan.mesh.coords(rank)
        for (name, first_row), log in recorder.logs.items():
            if name == layer:
                grid[first_row // each][coords.tp] = log
    return tuple(map(tuple, grid))


def values(logs: tuple[tuple[LayerLog, ...], ...], what: str, key: int | str) -> Grid | None:
    """One entry of every log as a grid, zero where no cotangent came; None where none came anywhere."""
    found = [[getattr(log, what).get(key) for log in parts] for parts in logs]
    there = next((x for parts in found for x in parts if x is not None), None)
    if there is None:
        return None
    return [[torch.zeros_like(there) if x is None else x for x in parts] for parts in found]
