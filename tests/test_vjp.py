"""The seam of differentiation: both engines give the same bits."""

from __future__ import annotations

import re

import pytest
import torch

from functional_par import ParallelError
from functional_par.vjp import engine

ENGINES = ["func", "tape"]
every_engine = pytest.mark.parametrize("name", ENGINES)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def function(x, w):
    y = torch.tanh(x @ w)
    return [y, (y * w[0]).sum()], [y.argmax(-1), y > 0]


def test_both_engines_give_the_same_bits():
    primals, cotangents = tensors((5, 3), (3, 4)), tensors((5, 4), ())
    results = []
    for name in ENGINES:
        outputs, aux, pull = engine(name)(function, *primals)
        results.append([*outputs, *aux, *pull(cotangents)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@every_engine
def test_the_pullback_is_that_of_autograd(name):
    primals, cotangents = tensors((5, 3), (3, 4)), tensors((5, 4), ())
    _, _, pull = engine(name)(function, *primals)
    leaves = [p.clone().requires_grad_() for p in primals]
    expected = torch.autograd.grad(function(*leaves)[0], leaves, cotangents)
    for a, b in zip(pull(cotangents), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@every_engine
def test_nothing_that_comes_out_belongs_to_a_graph(name):
    outputs, aux, pull = engine(name)(function, *tensors((5, 3), (3, 4)))
    results = [*outputs, *aux, *pull(tensors((5, 4), ()))]
    assert not any(t.requires_grad for t in results)
    assert not any(torch._C._functorch.is_gradtrackingtensor(t) for t in results)


@every_engine
def test_primals_are_left_alone(name):
    primals = tensors((5, 3), (3, 4))
    before = [p.clone() for p in primals]
    _, _, pull = engine(name)(function, *primals)
    pull(tensors((5, 4), ()))
    assert all(torch.equal(p, b) and not p.requires_grad for p, b in zip(primals, before, strict=True))


@every_engine
def test_a_primal_that_no_output_reads_gets_zeros(name):
    _, _, pull = engine(name)(lambda x, w: ([x * 2], []), *tensors((3,), (2,)))
    dx, dw = pull(tensors((3,)))
    assert torch.equal(dx, 2 * tensors((3,))[0])
    assert torch.equal(dw, torch.zeros(2, dtype=torch.float64))


@every_engine
def test_an_output_that_reads_no_primal_is_allowed(name):
    constant = torch.ones(2, dtype=torch.float64)
    outputs, _, pull = engine(name)(lambda x: ([constant * 3], []), *tensors((3,)))
    assert torch.equal(outputs[0], constant * 3)
    assert torch.equal(pull(tensors((2,)))[0], torch.zeros(3, dtype=torch.float64))
    outputs, _, pull = engine(name)(lambda x: ([constant * 3, x], []), *tensors((3,)))
    assert torch.equal(pull(tensors((2,), (3,)))[0], tensors((2,), (3,))[1])


@every_engine
def test_no_primals_have_an_empty_pullback(name):
    outputs, aux, pull = engine(name)(lambda: ([torch.ones(2)], [torch.tensor(1)]))
    assert torch.equal(outputs[0], torch.ones(2))
    assert aux[0] == 1
    assert pull([torch.ones(2)]) == ()


@every_engine
def test_a_primal_may_be_returned_as_it_is(name):
    (x,) = tensors((3,))
    outputs, _, pull = engine(name)(lambda x: ([x, x], []), x)
    assert torch.equal(outputs[0], x)
    a, b = tensors((3,), (3,))
    assert torch.equal(pull([a, b])[0], a + b)


@every_engine
def test_several_pullbacks_may_be_under_way_in_any_order(name):
    calls = [engine(name)(function, *[p * (i + 1) for p in tensors((5, 3), (3, 4))]) for i in range(3)]
    cotangents = tensors((5, 4), ())
    late = [calls[i][2](cotangents) for i in (2, 0, 1)]
    for grads, i in zip(late, (2, 0, 1), strict=True):
        _, _, pull = engine(name)(function, *[p * (i + 1) for p in tensors((5, 3), (3, 4))])
        assert all(torch.equal(a, b) for a, b in zip(grads, pull(cotangents), strict=True))


@every_engine
def test_a_pullback_frees_what_it_saved_when_it_runs(name):
    _, _, pull = engine(name)(function, *tensors((5, 3), (3, 4)))
    pull(tensors((5, 4), ()))
    with pytest.raises(RuntimeError, match="second time"):
        pull(tensors((5, 4), ()))


def test_an_unknown_engine_is_refused():
    with pytest.raises(ParallelError, match=re.escape("engine 'jax': it is one of func, tape, compile.")):
        engine("jax")
