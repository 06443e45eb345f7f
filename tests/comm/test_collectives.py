"""Forward mode, several pullbacks at once, integers and refusals; tests/properties has the definitions and the duals."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from functional_par.comm import collectives
from functional_par.comm.base import Group
from functional_par.comm.solo import SoloGroup
from functional_par.errors import ModelError
from functional_par.mesh import Mesh
from functional_par.run import run


@dataclass(frozen=True)
class Case:
    """A collective, and whether its input is the same on every rank."""

    name: str
    apply: Callable[[torch.Tensor, Group], torch.Tensor]
    replicated_in: bool = False


def shifted(x, group):
    return collectives.ppermute(x, group, tuple((i + 1) % group.size for i in range(group.size)))


def overlapping(x, group):
    return collectives.take(x, group, -1, tuple(range(group.size)), x.shape[-1] - group.size)


CASES = [
    Case("psum", collectives.psum),
    Case("pvary", collectives.pvary, replicated_in=True),
    Case("all_gather", lambda x, g: collectives.all_gather(x, g, 1)),
    Case("all_gather_replicated", lambda x, g: collectives.all_gather(x, g, -1, "replicated")),
    Case("slice", lambda x, g: collectives.slice(x, g, 0), replicated_in=True),
    Case("take", overlapping),
    Case("reduce_scatter", lambda x, g: collectives.reduce_scatter(x, g, -2)),
    Case("all_to_all", lambda x, g: collectives.all_to_all(x, g, 1, 0)),
    Case("all_to_all_one_dim", lambda x, g: collectives.all_to_all(x, g, -1, -1)),
    Case("ppermute", shifted),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def on_ranks(main, size):
    """``main(group)`` on every rank of a group of ``size``."""
    return run(lambda world: main(world.group("tp")), Mesh(tp=size))


def values(seed, group, shape, replicated):
    """Random float64 values of one rank: the same on every rank if ``replicated``."""
    generator = torch.Generator().manual_seed(seed if replicated else seed + 1 + group.index)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def primal(case, seed, group):
    return values(seed, group, (2 * group.size, 3 * group.size), case.replicated_in)


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
