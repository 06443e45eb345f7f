"""Is a program on a mesh the same function as its model in one process? Answered by the numbers, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functional_par import optim, tree
from functional_par.comm.base import World
from functional_par.mesh import Mesh
from functional_par.program import Program
from functional_par.run import run

TOLERANCE = 1e-10
"""Largest difference, relative to ``max(1, largest entry)``."""


@dataclass(frozen=True)
class Difference:
    """Something that is not what one process computes.

    Attributes:
        what: ``"loss"`` or the path of a leaf, whose gradient is meant.
        largest: largest absolute difference of an entry.
        ratio: by which factor the program's value is the reference's, where one factor explains it; else None.
    """

    what: str
    largest: float
    ratio: float | None

    def __str__(self) -> str:
        times = "" if self.ratio is None else f", {self.ratio:.6g} times what it should be"
        what = self.what if self.what == "loss" else f"gradient of {self.what}"
        return f"{what}: off by {self.largest:.3g}{times}"


def assert_equivalent(program: Program, mesh: Mesh, batch: Mapping[str, Tensor], *, seed: int = 0) -> None:
    """Raise AssertionError unless ``program`` on ``mesh`` has the loss and gradients of its model in one process.

    Runs one step on threads in float64, so take a small model and batch.

    Args:
        program: from ``fp.compose``.
        mesh: any mesh that the program has a plan for.
        batch: a global batch: dict of tensors with all rows in dim 0.
        seed: of the initial parameters.

    Raises:
        AssertionError: with the loss and each leaf that differ, by how much, and by which factor if there is one.
    """
    if found := differences(program, mesh, batch, seed=seed):
        lines = "\n".join(f"  {difference}" for difference in found)
        raise AssertionError(f"on {mesh} the program is not the function that model(params, batch) is:\n{lines}")


def differences(program: Program, mesh: Mesh, batch: Mapping[str, Tensor], *, seed: int = 0) -> tuple[Difference, ...]:
    """What differs, the loss first; see ``assert_equivalent``."""
    wide = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    loss, grads = _reference(program, wide, seed)
    program.plan(mesh)
    found_loss, found = run(lambda world: _step(program, world, wide, seed), mesh)[0]
    pairs = [("loss", found_loss, loss), *((path, found[path], grad) for path, grad in grads.items())]
    compared = [_difference(what, value, truth) for what, value, truth in pairs]
    return tuple(difference for difference in compared if difference is not None)


def _reference(program: Program, batch: Mapping[str, Tensor], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain function."""
    model = program.model
    leaves = tree.flatten(model.init(seed, dtype=torch.float64))
    trained = {path: leaf.requires_grad_() for path, leaf in leaves.items() if model.leaves[path].trainable}
    loss = model(tree.unflatten(leaves), batch)
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(trained, grads, strict=True))


def _step(program: Program, world: World, batch: Mapping[str, Tensor], seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the program: with plain gradient descent at rate 1, what a step takes off each leaf."""
    step = program.step(world, optim.sgd(lr=1.0), dtype=torch.float64)
    state = step.init(seed)
    before = tree.flatten(step.gather(state))
    state, metrics = step(state, batch)
    after = tree.flatten(step.gather(state))
    return torch.tensor(metrics["loss"], dtype=torch.float64), {path: before[path] - after[path] for path in before}


def _difference(what: str, value: Tensor, truth: Tensor) -> Difference | None:
    largest = (value - truth).abs().max().item() if truth.numel() else 0.0
    scale = max(1.0, truth.abs().max().item() if truth.numel() else 0.0)
    if largest <= TOLERANCE * scale:
        return None
    square: Any = (truth * truth).sum().item()
    ratio = (value * truth).sum().item() / square if square else None
    if ratio is not None and (value - ratio * truth).abs().max().item() > 1e-6 * scale:
        ratio = None
    return Difference(what, largest, ratio)
