"""Each collective against its dual, in the inner product of its types: varying values are summed over the ranks, a
replicated value counts once."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par.comm import collectives
from functional_par.comm.base import Group
from functional_par.comm.solo import SoloGroup
from functional_par.errors import ModelError
from functional_par.mesh import Mesh
from functional_par.run import run


@dataclass(frozen=True)
class Case:
    """A collective, and whether its input and its output are the same on every rank."""

    name: str
    apply: Callable[[torch.Tensor, Group], torch.Tensor]
    replicated_in: bool = False
    replicated_out: bool = False


def shifted(x, group):
    return collectives.ppermute(x, group, tuple((i + 1) % group.size for i in range(group.size)))


def overlapping(x, group):
    return collectives.take(x, group, -1, tuple(range(group.size)), x.shape[-1] - group.size)


CASES = [
    Case("psum", collectives.psum, replicated_out=True),
    Case("pvary", collectives.pvary, replicated_in=True),
    Case("all_gather", lambda x, g: collectives.all_gather(x, g, 1)),
    Case("all_gather_replicated", lambda x, g: collectives.all_gather(x, g, -1, "replicated"), replicated_out=True),
    Case("slice", lambda x, g: collectives.slice(x, g, 0), replicated_in=True),
    Case("take", overlapping),
    Case("reduce_scatter", lambda x, g: collectives.reduce_scatter(x, g, -2)),
    Case("all_to_all", lambda x, g: collectives.all_to_all(x, g, 1, 0)),
    Case("all_to_all_one_dim", lambda x, g: collectives.all_to_all(x, g, -1, -1)),
    Case("ppermute", shifted),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
sizes = st.integers(1, 4)
seeds = st.integers(0, 2**32)
few = settings(max_examples=6, deadline=None)


def on_ranks(main, size):
    """``main(group)`` on every rank of a group of ``size``."""
    return run(lambda world: main(world.group("tp")), Mesh(tp=size))


def values(seed, group, shape, replicated):
    """Random float64 values of one rank: the same on every rank if ``replicated``."""
    generator = torch.Generator().manual_seed(seed if replicated else seed + 1 + group.index)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def primal(case, seed, group):
    return values(seed, group, (2 * group.size, 3 * group.size), case.replicated_in)


def cotangent(case, seed, group, shape):
    return values(seed + 100, group, shape, case.replicated_out)


def inner(pairs, replicated):
    dots = [torch.dot(a.flatten(), b.flatten()).item() for a, b in pairs]
    return dots[0] if replicated else sum(dots)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@every_case
@given(size=sizes, seed=seeds)
@few
def test_pullback_is_the_transpose(case, size, seed):
    def main(group):
        x = primal(case, seed, group)
        y, pull = torch.func.vjp(lambda x: case.apply(x, group), x)
        ct = cotangent(case, seed, group, y.shape)
        return (y, ct), (x, pull(ct)[0])

    outer, inner_ = zip(*on_ranks(main, size), strict=True)
    assert inner(outer, case.replicated_out) == pytest.approx(inner(inner_, case.replicated_in), rel=1e-10, abs=1e-10)


@every_case
@given(size=sizes, seed=seeds)
@few
def test_values_of_a_replicated_type_are_the_same_on_every_rank(case, size, seed):
    def main(group):
        y, pull = torch.func.vjp(lambda x: case.apply(x, group), primal(case, seed, group))
        return y, pull(cotangent(case, seed, group, y.shape))[0]

    first, *others = on_ranks(main, size)
    for other in others:
        assert not case.replicated_out or torch.equal(first[0], other[0])
        assert not case.replicated_in or torch.equal(first[1], other[1])


@every_case
@given(size=sizes, seed=seeds)
@few
def test_plain_autograd_agrees_with_vjp_and_inputs_stay_as_they_were(case, size, seed):
    def main(group):
        x = primal(case, seed, group)
        y, pull = torch.func.vjp(lambda x: case.apply(x, group), x)
        ct = cotangent(case, seed, group, y.shape)
        before, leaf = (x.clone(), ct.clone()), x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(case.apply(leaf, group), leaf, ct)
        assert torch.equal(grad, pull(ct)[0])
        assert torch.equal(x, before[0])
        assert torch.equal(ct, before[1])

    on_ranks(main, size)


@every_case
@given(size=sizes, seed=seeds)
@few
def test_grad_of_grad_applies_the_map_and_its_dual(case, size, seed):
    def main(group):
        x, v = primal(case, seed, group), primal(case, seed + 50, group)
        y, pull = torch.func.vjp(lambda x: case.apply(x, group), x)
        c = cotangent(case, seed, group, y.shape)

        def half_square(x):
            return (c * case.apply(x, group) ** 2).sum() / 2

        second = torch.func.grad(lambda x: (v * torch.func.grad(half_square)(x)).sum())(x)
        close(second, pull(c * case.apply(v, group))[0])

    on_ranks(main, size)


@every_case
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_equals_a_loop_forward_and_back(case, dim):
    def main(group):
        x = torch.stack([primal(case, seed, group) for seed in range(3)], dim)

        def f(x):
            y, pull = torch.func.vjp(lambda x: case.apply(x, group), x)
            return y, pull(y)[0]

        got = torch.func.vmap(f, in_dims=dim)(x)
        want = [f(x.select(dim, i)) for i in range(3)]
        for batched, single in zip(got, zip(*want, strict=True), strict=True):
            assert torch.equal(batched, torch.stack(single))

    on_ranks(main, 2)


@every_case
def test_tangents_are_mapped_as_values_are(case):
    def main(group):
        x, v = primal(case, 0, group), primal(case, 1, group)
        y, tangent = torch.func.jvp(lambda x: case.apply(x, group), (x,), (v,))
        assert torch.equal(y, case.apply(x, group))
        assert torch.equal(tangent, case.apply(v, group))
        return y

    forward_mode_in_threads(lambda: on_ranks(main, 2))


def forward_mode_in_threads(function):
    """torch keeps the level of forward-mode AD in the process, so one that spans the threads is held around them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.func.jvp(lambda x: (function(), x)[1], (torch.ones(()),), (torch.ones(()),))


@every_case
def test_several_pullbacks_may_be_in_flight(case):
    def main(group):
        def f(x):
            return case.apply(x, group)

        xs = [primal(case, seed, group) for seed in range(3)]
        pulls = [torch.func.vjp(f, x) for x in xs]
        for y, pull in reversed(pulls):
            assert torch.equal(pull(y)[0], torch.func.vjp(f, y.new_zeros(xs[0].shape))[1](y)[0])

    on_ranks(main, 2)


@pytest.mark.parametrize(
    ("case", "forward", "backward"),
    [
        ("psum", ["all_reduce"], []),
        ("pvary", [], ["all_reduce"]),
        ("all_gather", ["all_gather"], ["reduce_scatter"]),
        ("all_gather_replicated", ["all_gather"], []),
        ("slice", [], ["all_gather"]),
        ("take", [], []),
        ("reduce_scatter", ["reduce_scatter"], ["all_gather"]),
        ("all_to_all", ["all_to_all"], ["all_to_all"]),
        ("ppermute", ["permute"], ["permute"]),
    ],
)
def test_calls_are_those_of_the_type_and_no_more(case, forward, backward):
    case = next(c for c in CASES if c.name == case)

    def main(world):
        group = world.group("tp")
        with world.record.during("forward"):
            y, pull = torch.func.vjp(lambda x: case.apply(x, group), primal(case, 0, group))
        with world.record.during("backward"):
            pull(y)
        return world.record.calls

    expected = {("forward", "tp", kind): 1 for kind in forward} | {("backward", "tp", kind): 1 for kind in backward}
    assert run(main, Mesh(tp=2)) == [expected, expected]


@given(size=sizes, seed=seeds)
@few
def test_pmax_is_the_maximum_and_a_constant(size, seed):
    def main(group):
        x = values(seed, group, (3, 4), replicated=False)
        top = collectives.pmax(x, group)
        close(torch.func.grad(lambda x: (x * collectives.pmax(x, group)).sum())(x), top)
        assert torch.equal(torch.func.vmap(lambda x: collectives.pmax(x, group), in_dims=1)(x), top.T)
        leaf = x.clone().requires_grad_()
        assert not collectives.pmax(leaf, group).requires_grad
        return x, top

    xs, tops = zip(*on_ranks(main, size), strict=True)
    assert all(torch.equal(top, torch.stack(xs).amax(0)) for top in tops)


def test_pmax_has_no_tangent():
    def main(group):
        x = values(0, group, (4,), replicated=False)
        y, tangent = torch.func.jvp(lambda x: x * collectives.pmax(x, group), (x,), (torch.ones_like(x),))
        assert torch.equal(tangent, collectives.pmax(x, group))
        return y

    forward_mode_in_threads(lambda: on_ranks(main, 2))


def test_integers_are_summed_too():
    assert on_ranks(lambda g: collectives.psum(torch.tensor([g.index, 1]), g).tolist(), 3) == [[3, 3]] * 3


def test_one_rank_is_the_identity():
    group, x = SoloGroup(), torch.randn(2, 3)
    for case in CASES:
        if case.name != "take":
            assert torch.equal(case.apply(x, group), x)
    assert torch.equal(collectives.take(x, group, 1, (1,), 2), x[:, 1:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g: collectives.slice(x, g, 1), r"slice over tp: dim 1 of \[4, 3\] has 3 entries, which 2 ranks"),
        (lambda x, g: collectives.reduce_scatter(x, g, -1), r"reduce_scatter over tp: dim 1 .* multiple of 2"),
        (lambda x, g: collectives.all_to_all(x, g, 1, 0), r"all_to_all over tp: dim 1 of \[4, 3\] has 3 entries"),
        (lambda x, g: collectives.all_gather(x, g, 2), r"all_gather over tp: dim 2 of a tensor of shape \[4, 3\]"),
        (lambda x, g: collectives.all_gather(x, g, 0, "sum"), r"to 'sum': its result is 'varying' or 'replicated'"),
        (lambda x, g: collectives.take(x, g, 0, (0,), 1), r"take over tp: 1 starts for 2 ranks"),
        (lambda x, g: collectives.take(x, g, 0, (0, 3), 2), r"windows of 2 that start at \(0, 3\) leave dim 0"),
        (lambda x, g: collectives.ppermute(x, g, (0, 0)), r"ppermute over tp to \(0, 0\): not a permutation of 0 to 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_numbers(call, message):
    with pytest.raises(ModelError, match=message):
        on_ranks(lambda group: call(torch.zeros(4, 3), group), 2)
