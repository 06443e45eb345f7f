"""Every transform is a linear map on parameters, from whole trees to shards, and what the library does to gradients is its
transpose: <shard(params), cotangents> = <params, transpose(cotangents)> in the inner product of the types."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_par as fp
from functional_par import Input, Mesh, Model, Param, tree
from functional_par.accumulate import Memory
from functional_par.buckets import groups
from functional_par.metrics import Totals
from functional_par.plan import Plan
from functional_par.reduce import Gradients
from functional_par.shards import gather_leaf

from .examples import few
from .inner import close

NORMS = (1.0, 2.0, math.inf)

RULES = {"vocab": "pad", "ffn": "pad", "kv_heads": "replicate"}
DIMS = ["embed", *RULES]


@dataclass(frozen=True)
class Drawn:
    """Leaves, the layers that read them, and the transforms.

    Attributes:
        leaves: name to (shape, dims, met): whether split compute over tp reads it.
        layers: names of the leaves that each layer reads.
        silent: leaves that no gradient reaches.
    """

    leaves: dict[str, tuple[tuple[int, ...], str, bool]]
    layers: list[list[str]]
    ties: list[tuple[str, ...]]
    split: list[int]
    mesh: Mesh
    silent: frozenset[str]
    seed: int

    def plan(self) -> Plan:
        params = {name: Param(shape, dims) for name, (shape, dims, _) in self.leaves.items()}
        met = {name for name, (_, _, split) in self.leaves.items() if split}
        layers = [(f"layer{i}", names, lambda p, x, par: read(p, x, par, met)) for i, names in enumerate(self.layers)]
        layers = [("start", [], lambda p, batch, par: batch["x"]), *layers]
        loss = lambda p, x, par: (x.sum(), len(x))  # noqa: E731
        model = Model(params, layers, loss, {"x": Input((None,), torch.float64)})
        named = {dim for _, dims, _ in self.leaves.values() for dim in dims.split()}
        rules = {dim: rule for dim, rule in RULES.items() if dim in named}
        pipeline = fp.stage_pp(split=self.split)
        program = fp.compose(
            *(fp.tie(*names) for names in self.ties), fp.shard_tp(dims=rules), pipeline, fp.dp_reduce()
        )
        return program(model).plan(self.mesh)


def read(p: Any, x: Tensor, par: fp.Par, met: set[str]) -> Tensor:
    """x [rows] times the sum of all leaves; those in ``met`` meet data that differ along tp."""
    if whole := [p[name].flatten() for name in p if name not in met]:
        x = x * torch.cat(whole).sum()
    if cut := [p[name].flatten() for name in p if name in met]:
        x = par.psum(par.pvary(x, "tp") * par.axis_index("tp") * torch.cat(cut).sum(), "tp")
    return x


def debts(drawn: Drawn, plan: Plan, path: str) -> set[str]:
    """Axes over which the gradient of a leaf is a partial sum: data, stages that share it, tp where it is whole but meets
    what is not."""
    spec, met = plan.specs[path], drawn.leaves[path][2]
    owed = (
        {"ep", "dp"}
        | ({"pp"} if len(spec.owners) > 1 else set())
        | ({"tp"} if met and "tp" not in spec.axes else set())
    )
    return {axis for axis in owed if drawn.mesh.sizes[axis] > 1}


def drawings(mesh: Mesh, rng: random.Random) -> Drawn:
    """Three leaves, each with up to three owners, read by up to two layers each, on any stages. From a seed, since a few
    examples from seeds differ in more than a few that hypothesis varies."""
    leaves: dict[str, tuple[tuple[int, ...], str, bool]] = {}
    ties = []
    for name in "abc":
        sharded = rng.choice(DIMS)
        dims = rng.sample(["in", "out"], rng.randint(0, 2))
        dims.insert(rng.randint(0, len(dims)), sharded)
        shape = tuple(rng.randint(1, 7 if dim == sharded else 3) for dim in dims)
        names = [f"{name}{i}" for i in range(rng.randint(1, 3))]
        leaves |= dict.fromkeys(names, (shape, " ".join(dims), sharded != "embed" or rng.random() < 0.5))
        ties += [tuple(rng.sample(names, len(names)))] if len(names) > 1 else []
    n = rng.randint(3, 5)
    layers: list[list[str]] = [[] for _ in range(n)]
    for name in leaves:
        for i in rng.sample(range(n), rng.choice((1, 1, 2))):
            layers[i].append(name)
    bounds = [0, *sorted(rng.sample(range(1, n + 1), mesh.pp - 1)), n + 1]
    silent = frozenset(rng.sample(sorted(leaves), rng.choice((0, 0, 1))))
    return Drawn(leaves, layers, ties, [b - a for a, b in pairwise(bounds)], mesh, silent, rng.getrandbits(32))


def cotangent(plan: Plan, rank: int, path: str, seed: int) -> Tensor:
    """A random cotangent of a rank's shard. Along an axis on which the leaf is neither cut nor owing it is replicated."""
    spec = plan.specs[path]
    return normal(hash((seed, list(plan.specs).index(path), *place(plan, rank, path))), spec.local_shape(plan.mesh))


def place(plan: Plan, rank: int, path: str) -> tuple[int, ...]:
    """Where a rank lies along the axes over which the cotangent of its shard varies."""
    spec = plan.specs[path]
    varies = {*spec.sharded, *(debt.axis for debt in spec.owes)}
    return tuple(n if axis in varies else -1 for axis, n in plan.mesh.coords(rank)._asdict().items())


def once(plan: Plan, path: str) -> Iterable[int]:
    """A rank for each different cotangent of a leaf."""
    stages = plan.specs[path].owners
    ranks = [rank for rank, coords in enumerate(plan.mesh) if coords.pp in stages]
    return {place(plan, rank, path): rank for rank in ranks}.values()


def normal(seed: int, shape: Iterable[int]) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed % 2**63), dtype=torch.float64)


def transpose(plan: Plan, world: fp.World, drawn: Drawn) -> Any:
    """What the library does to the gradients of a step: add them up, forget the padding, pay. Then norms and whole leaves."""
    grads = Gradients(plan, world.rank, Memory(torch.float64, torch.device("cpu")))
    for fill in (1.0, 0.0):  # the second step finds the memory of the first
        grads.begin()
        for path in plan.held(world.coords.pp):
            if fill or path not in drawn.silent:
                whole = cotangent(plan, world.rank, path, drawn.seed)
                grads.add({path: 0.25 * whole + fill})
                grads.add({path: 0.75 * whole})
        grads.complete()
    grads.pay(world)
    views = grads.views()
    norms = [Totals(plan, world.rank, n).over_world(world, [], views).norm for n in NORMS]
    whole = {path: gather_leaf(plan, world, path, views.get(path), torch.float64) for path in plan.specs}
    return views, norms, whole


MESHES = [
    Mesh(pp=3, tp=2),
    Mesh(pp=2, dp=2, tp=3),
    Mesh(ep=2, dp=2, tp=2),
    Mesh(ep=2, pp=3),
    Mesh(pp=2, tp=4),
    Mesh(dp=3),
    Mesh(),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@few(2, 0.1)
@given(st.integers(0, 2**32))
def test_what_is_done_to_gradients_is_the_transpose_of_what_is_done_to_parameters(mesh, seed):
    drawn = drawings(mesh, random.Random(seed))
    plan, n = drawn.plan(), drawn.mesh.size
    params = {path: normal(drawn.seed + i, leaf.shape) for i, (path, leaf) in enumerate(plan.model.leaves.items())}
    shards = [tree.flatten(fp.shard(tree.unflatten(params), plan, rank)) for rank in range(n)]

    def main(world):
        world.prepare(groups(plan))
        return transpose(plan, world, drawn)

    parts, norms, gathered = zip(*fp.run(main, drawn.mesh, timeout=30.0), strict=True)
    pulled = tree.flatten(fp.unshard([tree.unflatten(part) for part in parts], plan))
    for path, spec in plan.specs.items():
        assert {debt.axis for debt in spec.owes if drawn.mesh.sizes[debt.axis] > 1} == debts(drawn, plan, path), path
        cotangents = {
            rank: torch.zeros(spec.local_shape(drawn.mesh))
            if path in drawn.silent
            else cotangent(plan, rank, path, drawn.seed)
            for rank in once(plan, path)
        }
        forward = sum((shards[rank][path] * c).sum().item() for rank, c in cotangents.items())
        backward = (params[path] * pulled[path]).sum().item()
        assert forward == pytest.approx(backward, rel=1e-10, abs=1e-10), path
        copies: dict[Any, Tensor] = {}
        for rank, coords in enumerate(drawn.mesh):
            if coords.pp in spec.owners:
                first = copies.setdefault(spec.starts(drawn.mesh, coords), parts[rank][path])
                assert torch.equal(parts[rank][path], first), (path, rank)
            assert torch.equal(gathered[rank][path], pulled[path]), (path, rank)
    whole = torch.cat([pulled[path].flatten() for path in plan.specs])
    for found in norms:
        close(
            torch.tensor(found, dtype=torch.float64), torch.stack([torch.linalg.vector_norm(whole, p) for p in NORMS])
        )
