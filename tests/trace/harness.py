"""Runs a user's model under transforms on rank threads and says whether loss and gradients equal the plain function's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import functional_par as fp
from functional_par import tree
from functional_par.model import Model
from functional_par.plan import Plan
from functional_par.shards import cut

SEQ, EMBED = 6, 6
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Verdict:
    """How far a sharded step is from the plain function, relative to the size of what is compared.

    Attributes:
        plan: the plan that accepted the program.
        loss: of the loss.
        grads: of each leaf's gradient, on the rank where it is farthest; padding has to get none.
    """

    plan: Plan
    loss: float
    grads: Mapping[str, float]

    @property
    def same_function(self) -> bool:
        """The forward is the reference's."""
        return self.loss <= TOLERANCE

    @property
    def wrong(self) -> dict[str, float]:
        """The leaves whose gradients are not the reference's."""
        return {path: far for path, far in self.grads.items() if not far <= TOLERANCE}

    def check(self) -> None:
        """Loss and every gradient are right."""
        assert self.same_function, f"another function: {self.loss}"
        assert not self.wrong


def program_of(
    model: Model,
    mode: str = "ALL_REDUCE",
    microbatches: int = 1,
    ties: Sequence[Sequence[str]] = (),
    dims: Mapping[str, Any] | None = None,
) -> fp.Program:
    """The model under all four transforms."""
    transforms = [fp.shard_tp(mode=mode, dims=dims), fp.dp_reduce(), fp.stage_pp(microbatches=microbatches)]
    return fp.compose(*transforms, *(fp.tie(*names) for names in ties))(model)


def judge(model: Model, mesh: fp.Mesh, engine: str = "func", rows: int = 4, **options: Any) -> Verdict:
    """Take one step with sgd(lr=1) in float64: the parameter change is minus the gradient.

    Raises:
        ParallelError: if the program is refused.
    """
    program = program_of(model, **options)
    plan = program.plan(mesh)
    batch = batch_of(model, rows)

    def main(world: Any) -> Any:
        step = program.step(world, fp.optim.sgd(lr=1.0), dtype=torch.float64, engine=engine)
        before = step.init(0)
        after, metrics = step(before, batch)
        return before.params, after.params, metrics["loss"]

    results = fp.run(main, mesh, backend="threads", timeout=30.0)
    loss, grads = reference(plan.model, batch)
    distance = dict.fromkeys(grads, 0.0)
    for rank, (before, after, _) in enumerate(results):
        for path in set(grads) & set(tree.flatten(before)):
            changed = tree.get(before, path) - tree.get(after, path)
            distance[path] = max(distance[path], far(changed, cut(plan, plan.specs[path], grads[path], rank)))
    return Verdict(plan, far(torch.tensor(results[0][2], dtype=torch.float64), loss), distance)


def reference(model: Model, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the plain function in one process."""
    leaves = tree.flatten(model.init(0, torch.float64))
    wanted = {path: leaf.requires_grad_() for path, leaf in leaves.items() if model.leaves[path].trainable}
    loss = model(tree.unflatten(leaves), batch)
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return loss.detach(), dict(zip(wanted, grads, strict=True))


def batch_of(model: Model, rows: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Random numbers for every field of a batch."""
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for name, given in (model.batch or {}).items():
        shape = [rows if i == 0 else SEQ if size is None else size for i, size in enumerate(given.shape)]
        if given.dtype.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator, dtype=given.dtype)
        else:
            batch[name] = torch.randint(0, 5, shape, generator=generator).to(given.dtype)
    return batch


def far(actual: Tensor, expected: Tensor) -> float:
    """max|a-b| / max(1, max|b|)"""
    if not expected.numel():
        return 0.0
    return (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item())


def param(*shape: int, dims: str | None = None, trainable: bool = True) -> fp.Param:
    """A parameter whose numbers are of order one; its dims are not sharded unless they are named so."""
    return fp.Param(shape, dims or " ".join("abcdefg"[: len(shape)]), fp.init.normal(0.7), trainable)


def column(n: int = 6) -> fp.Param:
    """A weight [ffn, embed] that tp cuts by its outputs."""
    return param(n, EMBED, dims="ffn embed")


def row(n: int = 6) -> fp.Param:
    """A weight [embed, ffn] that tp cuts by its inputs."""
    return param(EMBED, n, dims="embed ffn")


def enter(p: Any, x: Any, par: Any) -> Tensor:
    """First layer: floats of the batch times a replicated weight, so that a cotangent flows back."""
    return torch.tanh(x["x"].to(p["w"].dtype) @ p["w"])


def total(p: Any, x: Tensor, par: Any) -> tuple[Tensor, int]:
    """A loss that tells every element of ``x`` from every other."""
    ramp = torch.linspace(-1.0, 1.0, x[0].numel(), dtype=x.dtype, device=x.device).reshape(x[0].shape)
    return (x.square() * 0.3 + x * ramp).sum(), len(par.batch["x"])


FIELDS = {"x": fp.Input((None, SEQ, EMBED), torch.float64), "ids": fp.Input((None, SEQ), torch.int64)}


def model_of(
    body: Callable[..., Any], params: Mapping[str, Any], loss: Any = total, after: Sequence[Any] = ()
) -> Model:
    """A model of one layer between ``enter`` and the loss; ``after`` are more layers."""
    leaves = {"enter": {"w": param(EMBED, EMBED)}, "body": dict(params)}
    return Model(leaves, [("enter", "enter", enter), ("body", "body", body), *after], loss, FIELDS)
