from __future__ import annotations

import re

import pytest
import torch

from functional_par.errors import ModelError
from functional_par.nn import rotary
from functional_par.run_par import RunPar

from .ranks import close, tensors, vjp


def plain(x, theta=10000.0, positions=None):
    """Llama's: (a, b) to (a cos - b sin, b cos + a sin) with the halves of a head as a and b, by complex numbers."""
    half = x.shape[-1] // 2
    positions = torch.arange(x.shape[1]) if positions is None else positions
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None] * frequencies)
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_and_its_gradient_equal_a_product_of_complex_numbers(fast, theta):
    x, ct = tensors((2, 9, 3, 8), (2, 9, 3, 8))
    turned, (grad,) = vjp(lambda x: rotary(x, RunPar(fast=fast), theta), [x], lambda _: [ct])
    expected, (expected_grad,) = vjp(lambda x: plain(x, theta), [x], lambda _: [ct])
    close(turned[0], expected[0])
    close(grad, expected_grad)


def test_positions_may_be_any_window_of_the_sequence():
    (x,) = tensors((2, 9, 3, 8))
    window = rotary(x[:, 4:7], RunPar(), positions=torch.arange(4, 7))
    assert torch.equal(window, rotary(x, RunPar())[:, 4:7])


def test_scores_depend_on_the_distance_alone():
    q, k = tensors((1, 1, 1, 8), (1, 1, 1, 8))

    def score(i, j):
        turned = (rotary(x, RunPar(), positions=torch.tensor([p])) for x, p in ((q, i), (k, j)))
        return torch.mul(*turned).sum()

    close(score(3, 5), score(100, 102))


@pytest.mark.parametrize("shape", [(2, 300, 64, 16), (1, 3, 64, 4096)])
def test_large_inputs_are_turned_in_blocks(shape):
    (x,) = tensors(shape)
    close(rotary(x, RunPar()), plain(x))


def test_several_are_turned_as_one_by_one_and_one_may_be_unused():
    q, k, ct = tensors((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    for fast in (False, True):
        par = RunPar(fast=fast)
        assert all(torch.equal(x, rotary(y, par)) for x, y in zip(rotary((q, k), par), (q, k), strict=True))
        _, (_, grad) = vjp(lambda q, k, par=par: rotary((q, k), par)[1], [q, k], lambda _: [ct])
        close(grad, vjp(plain, [k], lambda _: [ct])[1][0])
    with pytest.raises(
        ModelError, match=r"\[2, 5, 4, 8\], \[2, 4, 2, 8\] are turned together only if they have one sequence"
    ):
        rotary((q, k[:, :4]), RunPar())


def test_far_positions_keep_their_precision_in_float32():
    x = torch.ones(1, 1, 1, 8)
    far = torch.tensor([1_000_003])
    close(rotary(x, RunPar(), positions=far).double(), plain(x.double(), positions=far), 1e-6)


def test_low_precision_is_computed_in_float32():
    (x,) = tensors((1, 64, 2, 8))
    x = x.bfloat16()
    for fast in (False, True):
        y = rotary(x, RunPar(fast=fast))
        close(y, plain(x.double()).bfloat16(), torch.finfo(torch.bfloat16).eps)


def test_second_derivatives_are_right():
    (x,) = tensors((1, 3, 2, 4))

    def slope(turn):
        return lambda x: torch.func.grad(lambda x: turn(x).pow(3).sum())(x).square().sum()

    close(torch.func.grad(slope(lambda x: rotary(x, RunPar())))(x), torch.func.grad(slope(plain))(x))


def test_an_odd_head_size_is_an_error():
    with pytest.raises(ModelError, match=re.escape("rotary: the head size must be even, not 7.")):
        rotary(torch.zeros(1, 2, 1, 7), RunPar())
