"""Each collective against its definition and its dual, on groups along one axis or several, of any shape, empty too."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_par as fp
from functional_par import Mesh
from functional_par.comm import collectives
from functional_par.comm.base import AllReduce
from functional_par.run_par import RunPar

from .examples import few
from .inner import close, pairing

PLACES = [
    (Mesh(), ("tp",)),
    (Mesh(tp=2), ("tp",)),
    (Mesh(tp=3), ("tp",)),
    (Mesh(tp=4), ("tp",)),
    (Mesh(tp=6), ("tp",)),
    (Mesh(dp=2, tp=2), ("tp", "dp")),
    (Mesh(dp=3, tp=2), ("dp",)),
    (Mesh(ep=2, tp=3), ("ep", "tp")),
    (Mesh(ep=2, dp=2), ("dp", "ep")),
    (Mesh(pp=2, tp=2), ("tp",)),
]
"""A mesh, and the axes along which its ranks communicate."""

every_place = pytest.mark.parametrize(("mesh", "axes"), PLACES, ids=lambda value: str(value))
seeds = st.integers(0, 2**32)


@dataclass(frozen=True)
class Case:
    """One collective with its arguments.

    Attributes:
        apply: ``(x, surface) -> y``, where the surface is a ``Par`` with its axes bound, or a group.
        define: the values of all ranks to the results of all ranks, by the definition.
        shape: of the local input.
        calls: kinds of calls in forward and in backward.
    """

    name: str
    apply: Callable[[Tensor, Any], Tensor]
    define: Callable[[Sequence[Tensor]], list[Tensor]]
    shape: tuple[int, ...]
    calls: tuple[tuple[str, ...], tuple[str, ...]]
    replicated_in: bool = False
    replicated_out: bool = False


@dataclass(frozen=True)
class OneAxis:
    """The collectives of ``par`` along one axis, called as those of a group are."""

    par: RunPar
    axis: str

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return lambda x, *args: getattr(self.par, name)(x, self.axis, *args)


@dataclass(frozen=True)
class Merged:
    """psum, pvary and pmax of ``par`` along several axes, and the others of the group that joins them."""

    par: RunPar
    axes: tuple[str, ...]

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        if name in ("psum", "pvary", "pmax"):
            return lambda x: getattr(self.par, name)(x, *self.axes)
        return lambda x, *args: getattr(collectives, name)(x, self.par._merged(self.axes), *args)


def chunk(x: Tensor, i: int, n: int, dim: int) -> Tensor:
    return x.narrow(dim, i * (x.shape[dim] // n), x.shape[dim] // n)


def sum_of(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(xs)).sum(0)


def cases(n: int, rng: random.Random) -> list[Case]:
    """Every collective once, over n ranks, with random shapes and dims. From a seed, since a few examples from seeds differ
    in more than a few that hypothesis varies."""
    ranks = range(n)

    def shape(times: int = 1, least: int = 1) -> tuple[tuple[int, ...], int]:
        """Sizes, now and then zero, one of them a multiple, and which."""
        sizes = [rng.choice((0, 1, 1, 2, 2, 2, 3, 3)) for _ in range(rng.randint(least, 3))]
        at = rng.randrange(-len(sizes), len(sizes)) if sizes else 0
        if sizes:
            sizes[at] *= times
        return tuple(sizes), at

    (free, _), (one, a), (two, b), (three, c), (four, d), (five, e), (six, f) = (
        shape(*options) for options in [(1, 0), (1,), (1,), (n,), (1,), (n,), (n,)]
    )
    g, to = rng.randrange(-len(six), len(six)), tuple(rng.sample(ranks, n))
    length = rng.randint(0, four[d])
    starts = tuple(rng.randint(0, four[d] - length) for _ in ranks)
    none = ()
    return [
        Case("psum", lambda x, s: s.psum(x), lambda xs: [sum_of(xs)] * n, free, (("all_reduce",), none), False, True),
        Case("pvary", lambda x, s: s.pvary(x), list, free, (none, ("all_reduce",)), True),
        Case(
            "all_gather",
            lambda x, s: s.all_gather(x, a),
            lambda xs: [torch.cat(list(xs), a)] * n,
            one,
            (("all_gather",), ("reduce_scatter",)),
        ),
        Case(
            "all_gather to replicated",
            lambda x, s: s.all_gather(x, b, "replicated"),
            lambda xs: [torch.cat(list(xs), b)] * n,
            two,
            (("all_gather",), none),
            False,
            True,
        ),
        Case(
            "slice",
            lambda x, s: s.slice(x, c),
            lambda xs: [chunk(xs[0], i, n, c) for i in ranks],
            three,
            (none, ("all_gather",)),
            True,
        ),
        Case(
            "take",
            lambda x, s: s.take(x, d, starts, length),
            lambda xs: [x.narrow(d, start, length) for x, start in zip(xs, starts, strict=True)],
            four,
            (none, none),
        ),
        Case(
            "reduce_scatter",
            lambda x, s: s.reduce_scatter(x, e),
            lambda xs: [chunk(sum_of(xs), i, n, e) for i in ranks],
            five,
            (("reduce_scatter",), ("all_gather",)),
        ),
        Case(
            "all_to_all",
            lambda x, s: s.all_to_all(x, f, g),
            lambda xs: [torch.cat([chunk(x, i, n, f) for x in xs], g) for i in ranks],
            six,
            (("all_to_all",), ("all_to_all",)),
        ),
        Case(
            "ppermute",
            lambda x, s: s.ppermute(x, to),
            lambda xs: [xs[to.index(i)] for i in ranks],
            free,
            (("permute",), ("permute",)),
        ),
    ]


def normal(seed: int, shape: Sequence[int], replicated: bool, rank: int) -> Tensor:
    """Values of one rank; the same on every rank if replicated."""
    generator = torch.Generator().manual_seed(seed if replicated else seed + 1 + rank)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def surface(world: fp.World, axes: tuple[str, ...]) -> Any:
    """The collectives along the axes, through ``par``, and this rank's place in its group."""
    single = [axis for axis, size in world.mesh.sizes.items() if size > 1 and axis != "pp"]
    ordered = tuple(axis for axis in world.mesh.sizes if axis in axes)
    world.prepare(world.mesh.groups(*ordered))
    groups = {key: world.group(*key) for key in [*((axis,) for axis in single), ordered] if key}
    par = RunPar(groups if world.mesh.size > 1 else {})
    return (OneAxis(par, axes[0]) if len(axes) == 1 else Merged(par, axes)), par._merged(axes)


def second_derivative(f, x, v, c):
    """Of <c, f(x)^2> / 2 along v, by differentiating a gradient."""
    slope = torch.func.grad(lambda x: (c * f(x) ** 2).sum() / 2)
    return torch.func.grad(lambda x: (v * slope(x)).sum())(x)


def there_and_back(f):
    def both(x, c):
        y, pull = torch.func.vjp(f, x)
        return y, pull(c)[0]

    return both


def on_tape(f, x, c):
    leaf = x.clone().requires_grad_()
    y = f(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, c)[0]


def check_one(case: Case, collective: Any, group: Any, world: fp.World, seed: int) -> tuple[Tensor, ...]:
    """Everything that one rank can see of one collective; returns x, f(x), c and the pulled c."""

    def f(x: Tensor) -> Tensor:
        return case.apply(x, collective)

    def primal(n: int) -> Tensor:
        return normal(seed + 100 * n, case.shape, case.replicated_in, world.rank)

    x, z, v = primal(0), primal(1), primal(2)
    record = world.record
    record.clear()
    with record.during("forward"):
        y, pull = torch.func.vjp(f, x)
    c, d = (normal(seed + 1000 * n, y.shape, case.replicated_out, world.rank) for n in (1, 2))
    kept = x.clone(), c.clone()
    with record.during("backward"):
        pulled = pull(c)[0]
    check_calls(case, record, group, {"forward": x, "backward": c})
    close(f(2 * x - 3 * z), 2 * y - 3 * f(z), "linear")
    if seed % 3 == 0:  # each of these takes as long as all the rest
        close(second_derivative(f, x, v, c), pull(c * f(v))[0], "grad of grad")
    elif seed % 3 == 1:
        dim = seed // 3 % (x.ndim + 1)
        batched = torch.func.vmap(there_and_back(f), in_dims=dim, out_dims=dim)(
            torch.stack([x, z], dim), torch.stack([c, d], dim)
        )
        for got, *want in zip(batched, (y, pulled), there_and_back(f)(z, d), strict=True):
            assert torch.equal(got, torch.stack(want, dim)), "vmap"
    else:
        for result, again in zip((y, pulled), on_tape(f, x, c), strict=True):
            assert torch.equal(result, again), "autograd"
    assert torch.equal(x, kept[0]), "an input was modified"
    assert torch.equal(c, kept[1]), "a cotangent was modified"
    return x, y, c, pulled


def check_calls(case: Case, record: Any, group: Any, carried: dict[str, Tensor]) -> None:
    """One call of each kind, which carries the local input; none in a group of one."""
    calls, nbytes = Counter(), Counter()
    for phase, kinds in zip(("forward", "backward"), case.calls, strict=True):
        for kind in kinds if group.size > 1 else ():
            calls[phase, group.label, kind] += 1
            nbytes[phase, group.label, kind] += carried[phase].numel() * 8
    assert record.calls == calls
    assert record.nbytes == nbytes


def on_rank(world: fp.World, axes: tuple[str, ...], seed: int) -> list[tuple[Tensor, ...]]:
    """What one rank finds, on any backend: for each case x, f(x), c and the pulled c."""
    collective, group = surface(world, axes)
    found = cases(group.size, random.Random(seed))
    return [check_one(case, collective, group, world, seed + i) for i, case in enumerate(found)]


def check_all(mesh: Mesh, axes: tuple[str, ...], seed: int, found: Sequence[list[tuple[Tensor, ...]]]) -> None:
    """What only all ranks together show: definitions, and the dot test. ``found`` has an entry a rank."""
    for i, case in enumerate(cases(len(mesh.group(*axes, rank=0)), random.Random(seed))):
        for ranks in mesh.groups(*axes):
            x, y, c, pulled = zip(*(found[rank][i] for rank in ranks), strict=True)
            for got, want in zip(y, case.define(x), strict=True):
                close(got, want, case.name)
            assert not case.replicated_out or all(torch.equal(got, y[0]) for got in y), case.name
            assert not case.replicated_in or all(torch.equal(got, pulled[0]) for got in pulled), case.name
            assert pairing(x, y, c, pulled, case.replicated_in, case.replicated_out).holds, case.name


@every_place
@few(2, 0.1)
@given(seeds)
def test_a_collective_is_linear_equals_its_definition_and_its_pullback_is_the_transpose(mesh, axes, seed):
    check_all(mesh, axes, seed, fp.run(lambda world: on_rank(world, axes, seed), mesh, timeout=30.0))


@every_place
@few(2, 0.1)
@given(seeds, st.lists(st.integers(0, 3), max_size=3))
def test_pmax_is_the_maximum_and_a_constant(mesh, axes, seed, shape):
    def main(world):
        collective, _ = surface(world, axes)
        x = normal(seed, shape, False, world.rank)
        top = collective.pmax(x)
        close(torch.func.grad(lambda x: (x * collective.pmax(x)).sum())(x), top)
        dim = seed % (x.ndim + 1)
        stacked = torch.func.vmap(collective.pmax, in_dims=dim, out_dims=dim)(torch.stack([x, -x], dim))
        assert torch.equal(stacked, torch.stack([top, collective.pmax(-x)], dim))
        return x, top

    found = fp.run(main, mesh, timeout=30.0)
    for ranks in mesh.groups(*axes):
        largest = torch.stack([found[rank][0] for rank in ranks]).amax(0)
        assert all(torch.equal(found[rank][1], largest) for rank in ranks)


class SumBothWays(torch.autograd.Function):
    """What the functional collectives of torch do: the backward of a sum is a sum."""

    @staticmethod
    def forward(x, group):
        return group.start(AllReduce(), x).wait()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx, ct):
        return ctx.group.start(AllReduce(), ct).wait(), None


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_the_inner_product_of_the_types_fails_psum_psum_and_passes_psum_pvary_and_a_plain_sum_does_the_opposite(n):
    def main(world):
        group, found = world.group("tp"), []
        x, c = normal(1, (3, 2), False, group.index), normal(2, (3, 2), True, group.index)
        for f in (collectives.psum, SumBothWays.apply):
            y, pull = torch.func.vjp(lambda x, f=f: f(x, group), x)
            found.append((x, y, c, pull(c)[0]))
        return found

    right, wrong = (list(zip(*ranks, strict=True)) for ranks in zip(*fp.run(main, Mesh(tp=n)), strict=True))
    assert pairing(*right, replicated_in=False, replicated_out=True).holds
    typed = pairing(*wrong, replicated_in=False, replicated_out=True)
    assert typed.backward == pytest.approx(n * typed.forward, rel=1e-10)
    assert not typed.holds
    assert not pairing(*right, replicated_in=False, replicated_out=False).holds
    assert pairing(*wrong, replicated_in=False, replicated_out=False).holds
