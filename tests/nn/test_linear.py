from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from functional_par.errors import ModelError
from functional_par.nn import column_linear, row_linear
from functional_par.run_par import RunPar

from .ranks import (
    AR,
    RS,
    Split,
    calls,
    close,
    every_mode,
    on_ranks,
    stream,
    tensors,
    vjp,
)


@pytest.mark.parametrize("async_comm", [False, True])
@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [(AR, {}, {"all_reduce": 1}), (RS, {"all_gather": 1}, {"reduce_scatter": 1})],
    ids=["ar", "rs"],
)
def test_column_forward_makes_no_call_in_all_reduce_and_backward_one_for_all_weights(
    mode, forward, backward, async_comm
):
    x, *weights = tensors((2, 4, 6), (3, 6), (5, 6), (2, 6))

    def main(par, rank):
        counts = []

        def cotangents(outs):
            counts.append(calls(par))
            return tensors(*(y.shape for y in outs))

        vjp(lambda x, *weights: column_linear(x, weights, par), [x, *weights], cotangents)
        return [*counts, calls(par)]

    assert on_ranks(2, main, mode, async_comm=async_comm) == [[forward, backward]] * 2


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [(AR, {"all_reduce": 1}, {}), (RS, {"reduce_scatter": 1}, {"all_gather": 1})],
    ids=["ar", "rs"],
)
def test_row_linear_makes_one_call_forward_and_one_backward_in_reduce_scatter_alone(mode, forward, backward, fast):
    x, w = tensors((2, 4, 6), (3, 6))

    def main(par, rank):
        counts = []

        def cotangents(outs):
            counts.append(calls(par))
            return tensors(*(y.shape for y in outs))

        vjp(lambda x, w: row_linear(x, w, par), [x, w], cotangents)
        return [*counts, calls(par)]

    assert on_ranks(2, main, mode, fast=fast) == [[forward, backward]] * 2


@every_mode
@pytest.mark.parametrize("async_comm", [False, True])
def test_second_derivatives_of_fast_kernels_are_right(mode, async_comm):
    x, w, r, direction = tensors((2, 4, 6), (8, 6), (6, 8), (2, 4, 6))

    def energy(block):
        return lambda x: block(x).square().sum()

    def plain(x):
        return F.linear(F.linear(x, w).square(), r)

    expected = torch.func.grad(lambda x: (torch.func.grad(energy(plain))(x) * direction).sum())(x)

    def main(par, rank):
        cut = lambda t, dim: Split(dim).put(t, rank, 2)  # noqa: E731
        local_w, local_r = cut(w, 0), cut(r, 1)

        def block(x):
            return row_linear(column_linear(x, local_w, par).square(), local_r, par)

        place = stream(mode)
        gradient = torch.func.grad(energy(block))
        local = place.put(direction, rank, 2)
        return torch.func.grad(lambda x: (gradient(x) * local).sum())(place.put(x, rank, 2))

    close(stream(mode).collect(on_ranks(2, main, mode, async_comm=async_comm), x), expected)


@every_mode
def test_a_pullback_gives_the_same_bits_twice(mode):
    x, w = tensors((2, 4, 6), (8, 6))

    def main(par, rank):
        y, pull = torch.func.vjp(lambda x, w: row_linear(column_linear(x, w, par), w.t(), par), x, w)
        ct = tensors(y.shape)[0]
        with torch.no_grad():
            first = pull(ct, retain_graph=True, create_graph=False)
            second = pull(ct, retain_graph=False, create_graph=False)
        return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    assert on_ranks(2, main, mode, async_comm=True) == [True, True]


def test_frozen_weights_get_no_gradient_and_the_input_still_does():
    x, w, v = tensors((2, 4, 6), (8, 6), (4, 6))
    ct_w, ct_v = tensors((2, 4, 8), (2, 4, 4))

    def main(par, rank):
        _, pull = torch.func.vjp(lambda x: column_linear(x, (w, v), par), x)
        with torch.no_grad():
            return pull((ct_w, ct_v))[0]

    for grad in on_ranks(2, main, async_comm=True):
        close(grad, 2 * (ct_w @ w + ct_v @ v))


def test_shapes_that_do_not_fit_are_errors_that_name_them():
    par, (x, w, b) = RunPar(), tensors((2, 4, 6), (8, 5), (7,))
    message = "column_linear: the input ends in [6] but a weight of shape [8, 5] takes [5]."
    with pytest.raises(ModelError, match=re.escape(message)):
        column_linear(x, w, par)
    message = "row_linear: the input ends in [6] but a weight of shape [8, 5] takes [5]."
    with pytest.raises(ModelError, match=re.escape(message)):
        row_linear(x, w, par)
    message = "column_linear: a weight of shape [8, 5] takes a bias of [8], not [7]."
    with pytest.raises(ModelError, match=re.escape(message)):
        column_linear(x[..., :5], w, par, b)
    message = "column_linear: 2 weights and 1 biases; give one (or None) each."
    with pytest.raises(ModelError, match=re.escape(message)):
        column_linear(x, (w, w), par, (b,))


def test_an_uneven_sequence_in_reduce_scatter_is_an_error_with_the_numbers():
    x, w = tensors((2, 7, 6), (4, 6))
    message = "a sequence of 7 positions cannot be split over tp=3: 7 = 2 * 3 + 1. REDUCE_SCATTER needs a multiple of 3"
    with pytest.raises(ModelError, match=re.escape(message)):
        on_ranks(3, lambda par, rank: row_linear(x, w, par), RS)
