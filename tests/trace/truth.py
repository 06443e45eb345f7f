"""Whether the trace is right about a free program: by the library's own step, by ranks that run without any check, and by the
joint function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

import functional_par as fp
from functional_par import tree
from functional_par.errors import SuperfluousCollective, TraceError
from functional_par.plan import Plan
from functional_par.run_par import RunPar
from functional_par.shards import cut
from functional_par.transforms.base import Transform
from tests.trace.free import Anchors, Program, model_of
from tests.trace.harness import batch_of
from tests.trace.joint import Call, Joint, arranged, evaluate, joint, piece, share, whole_leaves


@dataclass(frozen=True)
class OverDP(Transform):
    """``dp_reduce`` over dp alone."""

    def __call__(self, plan: Plan) -> Plan:
        return replace(plan, data_axes=("dp",)).use("dp")


def transforms_of(mesh: fp.Mesh) -> list[Transform]:
    """Those that use the axes of the mesh and no others, so that no axis of size one takes part in the types."""
    data = [fp.dp_reduce()] if mesh.ep > 1 else [OverDP()] if mesh.dp > 1 else []
    return [*([fp.shard_tp()] if mesh.tp > 1 else []), *data]


@dataclass(frozen=True)
class Verdict:
    """What the trace said, and what is wrong with that; "" for nothing."""

    accepted: bool
    complaint: str = ""
    message: str = ""


def examine(program: Program, mesh: fp.Mesh, engine: str = "func") -> Verdict:
    """Accepted programs have the joint function's gradients; refused ones are wrong."""
    transforms = transforms_of(mesh)
    model = model_of(program)
    arrangement = arranged(model, mesh, transforms)
    batch = batch_of(model, rows=mesh.ep * mesh.dp)
    try:
        built = fp.Program(model, tuple(transforms))
        built.plan(mesh)
    except TraceError as error:
        return Verdict(False, refused_though_right(program, arrangement, batch, error), str(error))
    return Verdict(True, accepted_though_wrong(built, mesh, batch, joint(arrangement, batch), engine))


def accepted_though_wrong(built: Any, mesh: fp.Mesh, batch: Mapping[str, Tensor], truth: Joint, engine: str) -> str:
    """What differs between a step of the library and the joint function."""
    plan = built.plan(mesh)
    for rank in range(mesh.size):
        first = plan.replica(rank) * (mesh.size // plan.replicas)
        if not equal(truth.losses[rank], truth.losses[first]):
            return f"the losses of one replica differ: {truth.losses}"

    def main(world: Any) -> Any:
        step = built.step(world, fp.optim.sgd(lr=1.0), dtype=torch.float64, engine=engine)
        before = step.init(0)
        after, metrics = step(before, batch)
        return tree.flatten(before.params), tree.flatten(after.params), metrics["loss"]

    for rank, (before, after, loss) in enumerate(fp.run(main, mesh, backend="threads", timeout=30.0)):
        if not equal(torch.tensor(loss, dtype=torch.float64), truth.loss):
            return f"the loss is {loss}, not {truth.loss.item()}"
        for path, grad in truth.grads.items():
            # The change of a parameter is rounded as the parameter is.
            if not equal(before[path] - after[path], cut(plan, plan.specs[path], grad, rank), 1e-11):
                return f"the gradient of {path} on rank {rank} is wrong; it owes {plan.specs[path].owes}"
    return ""


def refused_though_right(program: Program, plan: Plan, batch: Mapping[str, Tensor], error: TraceError) -> str:
    """Why a refusal is not borne out by the numbers; "" if it is."""
    truth = joint(plan, batch, lambda rank: model_of(program, Anchors()))
    if isinstance(error, SuperfluousCollective) and is_true(str(error), truth.calls):
        return ""
    return "" if numbers_are_wrong(program, plan, batch, truth) else f"refused, but the numbers are right: {error}"


SAID = re.compile(
    r"par\.(\w+) over ([\w ]+?) of (a value that is already the same|copies|a value that (already )?differs)"
)


def is_true(message: str, calls: Sequence[Call]) -> bool:
    """Whether a message about a superfluous collective says what is so: some call of that name was given what it says. Such
    a call makes the ranks another function than one process, or is of no use, whatever its derivative."""
    if not (found := SAID.search(message)):
        return False
    name, axes, differs = found[1], set(found[2].split(" and ")), "differs" in found[3]
    named = [call for call in calls if call.name == name and axes <= set(call.axes)]
    return any(not (axes & call.same and call.grad) if differs else axes <= call.same for call in named)


def numbers_are_wrong(program: Program, plan: Plan, batch: Mapping[str, Tensor], truth: Joint) -> bool:
    """True if ranks of one replica have different losses, or if for some leaf neither each rank's own gradient nor its sum
    over any axes is the joint one. This knows nothing of types and debts."""
    mesh = plan.mesh
    for rank in range(mesh.size):
        if not equal(truth.losses[rank], truth.losses[rank - mesh.coords(rank).tp]):
            return True
    found = unchecked(program, plan, batch)
    return any(not payable(plan, path, [grads[path] for grads in found], grad) for path, grad in truth.grads.items())


def unchecked(
    program: Program, plan: Plan, batch: Mapping[str, Tensor], anchored: bool = True
) -> list[dict[str, Tensor]]:
    """Each rank's own gradients with the library's collectives and nothing else of it."""
    whole = whole_leaves(plan.model)
    count = max(int(plan.model.count_terms(batch)), 1)

    def main(world: Any) -> dict[str, Tensor]:
        own = {path: piece(plan, plan.specs[path], x, world.rank).clone() for path, x in whole.items()}
        wanted = {path: x.requires_grad_() for path, x in own.items() if plan.model.leaves[path].trainable}
        rows, first = share(plan, batch, world.rank)
        groups = {axes: world.group(*axes) for axes in subsets(long_axes(plan.mesh)) if axes}
        par = RunPar(groups, batch=rows, first_row=first)
        loss = evaluate(model_of(program, Anchors() if anchored else None), own, par) / count
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(wanted, grads, strict=True))

    return fp.run(main, plan.mesh, backend="threads", timeout=30.0)


def payable(plan: Plan, path: str, found: list[Tensor], expected: Tensor) -> bool:
    """Whether the sum of the ranks' gradients over some axes, perhaps none, is right on every rank."""
    spec, mesh = plan.specs[path], plan.mesh
    free = [axis for axis in long_axes(mesh) if axis not in spec.axes]
    wanted = [cut(plan, spec, expected, rank) for rank in range(mesh.size)]

    def right(axes: tuple[str, ...]) -> bool:
        groups = [mesh.group(*axes, rank=rank) if axes else (rank,) for rank in range(mesh.size)]
        return all(
            equal(torch.stack([found[r] for r in group]).sum(0), want)
            for group, want in zip(groups, wanted, strict=True)
        )

    return any(right(axes) for axes in subsets(free))


def long_axes(mesh: fp.Mesh) -> list[str]:
    """The axes with more than one rank, in mesh order."""
    return [axis for axis, size in mesh.sizes.items() if size > 1]


def subsets(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """All choices among the axes, each in mesh order."""
    return [chosen for n in range(len(axes) + 1) for chosen in combinations(axes, n)]


def equal(a: Tensor, b: Tensor, floor: float = 1e-12) -> bool:
    """Up to rounding, and close enough to tell a wrong gradient that is small."""
    scale = max(a.abs().max().item(), b.abs().max().item()) if a.numel() else 0.0
    return not a.numel() or (a - b).abs().max().item() <= floor + 1e-9 * scale
