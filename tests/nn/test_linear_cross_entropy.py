from __future__ import annotations

import re
import sys

import pytest
import torch
import torch.nn.functional as F

from functional_par.capture import Capture
from functional_par.errors import DataError, ModelError
from functional_par.nn import column_linear, cross_entropy, linear_cross_entropy
from functional_par.run_par import RunPar

from .ranks import AR, Split, close, every_mode, on_ranks, stream, tensors, vjp

module = sys.modules["functional_par.nn.linear_cross_entropy"]

LABELS = torch.tensor([[0, -100, 4, 1, 6, 3], [2, 5, 6, -100, 0, 0]])


def plain(x, w):
    flat = F.cross_entropy(F.linear(x, w).flatten(0, 1), LABELS.flatten(), reduction="none")
    return flat.view(LABELS.shape)


class Gradient:
    """Adds up the gradient of one weight."""

    def __init__(self, like):
        self.total = torch.zeros_like(like)

    def buffer(self, path):
        return self.total, False


def run_captured(x, w, par, ct, later=None):
    """Loss, input gradient and gradient of the weight, as a layer of the step has them."""
    capture, gradient = Capture({"w": w}), Gradient(w)
    token = torch.zeros((), dtype=x.dtype, requires_grad=True)
    inside, x = par.within("head", capture), x.clone().requires_grad_()
    with capture.forward({"w": w}, token):
        loss = linear_cross_entropy(x, w, LABELS, inside, vocab=7)
    with capture.backward(gradient, later):
        (grad,) = torch.autograd.grad(loss, x, ct, retain_graph=True)
    return loss, grad, gradient, x


@pytest.mark.parametrize("block", [1, 7, 20, 1000])
def test_blocks_of_any_number_of_rows_give_the_plain_loss_and_gradients(block, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", block)
    x, w, ct = tensors((2, 6, 3), (7, 3), (2, 6))
    expected, (gx, gw) = vjp(plain, [x, w], lambda _: [ct])
    loss, grads = vjp(lambda x, w: linear_cross_entropy(x, w, LABELS, RunPar(), vocab=7), [x, w], lambda _: [ct])
    for found, want in zip((*loss, *grads), (*expected, gx, gw), strict=True):
        close(found, want)
    loss, grad, gradient, _ = run_captured(x, w, RunPar(), ct)
    for found, want in zip((loss.detach(), grad, gradient.total), (*expected, gx, gw), strict=True):
        close(found, want)


@every_mode
@pytest.mark.parametrize("tp", [1, 3])
def test_second_derivatives_are_right(mode, tp):
    x, w, weights, direction, across = tensors((2, 6, 3), (7, 3), (2, 6), (2, 6, 3), (7, 3))

    def slope(loss, direction, across):
        gradients = torch.func.grad(lambda x, w: (loss(x, w).square() * weights).sum(), (0, 1))
        return lambda x, w: sum((g * d).sum() for g, d in zip(gradients(x, w), (direction, across), strict=True))

    expected = torch.func.grad(slope(plain, direction, across), (0, 1))(x, w)

    def main(par, rank):
        cut = [place.put(t, rank, tp) for place, t in zip(places * 2, (direction, across, x, w), strict=True)]
        return torch.func.grad(slope(lambda x, w: linear_cross_entropy(x, w, LABELS, par, vocab=7), *cut[:2]), (0, 1))(
            *cut[2:]
        )

    places = (stream(mode), Split(0))
    for place, want, *found in zip(places, expected, *on_ranks(tp, main, mode), strict=True):
        close(place.collect(found, want), want)


def test_a_captured_weight_is_differentiated_where_a_graph_of_the_backward_is_wanted():
    x, w, ct, direction = tensors((2, 6, 3), (7, 3), (2, 6), (2, 6, 3))

    def found(function, x):
        (grad,) = torch.autograd.grad(function(x).square(), x, ct, create_graph=True)
        return torch.autograd.grad(grad, x, direction)[0]

    capture, leaf = Capture({"w": w}), x.clone().requires_grad_()
    par = RunPar(capture=capture)
    with capture.forward({"w": w}, torch.zeros((), requires_grad=True)):
        actual = found(lambda x: linear_cross_entropy(x, w, LABELS, par, vocab=7), leaf)
    close(actual, found(lambda x: plain(x, w), x.clone().requires_grad_()))


def test_a_captured_backward_that_ran_runs_no_second_time():
    x, w, ct = tensors((2, 6, 3), (7, 3), (2, 6))
    loss, *_, leaf = run_captured(x, w, RunPar(), ct)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf, ct)
    loss = linear_cross_entropy(leaf, w, LABELS, RunPar(), vocab=7)
    first, second = (torch.autograd.grad(loss, leaf, ct, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_one_tensor_of_the_size_of_the_logits_is_made_and_kept():
    x, w, ct = tensors((2, 6, 3), (7, 3), (2, 6))
    later, kept = [], []

    def pack(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run_captured(x, w, RunPar(), ct, later)
    (logits,) = (t for t in kept if t.numel() == LABELS.numel() * 7)
    assert later[0].cotangent.data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("captured", [False, True])
def test_bfloat16_rounds_the_gradient_of_the_logits_and_not_the_loss(captured):
    x, w, ct = (t.bfloat16() for t in tensors((2, 6, 3), (7, 3), (2, 6)))
    par = RunPar(fast=False)
    reference = lambda x, w: cross_entropy(column_linear(x, w, par), LABELS, par, vocab=7)  # noqa: E731
    (expected,), (gx, gw) = vjp(reference, [x, w], lambda _: [ct.float()])
    if captured:
        loss, grad, gradient, _ = run_captured(x, w, RunPar(), ct.float())
        found = loss.detach(), grad, gradient.total
    else:
        run = lambda x, w: linear_cross_entropy(x, w, LABELS, RunPar(), vocab=7)  # noqa: E731
        (loss,), grads = vjp(run, [x, w], lambda _: [ct.float()])
        found = loss, *grads
    assert [t.dtype for t in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    close(found[0], expected, 1e-6)
    for actual, want in zip(found[1:], (gx, gw), strict=True):
        close(actual, want, 4 * torch.finfo(torch.bfloat16).eps)


def test_padding_counts_for_nothing_whatever_it_holds():
    x, w, ct = tensors((2, 6, 3), (7, 3), (2, 6))
    (expected,), (gx, gw) = vjp(plain, [x, w], lambda _: [ct])

    def main(par, rank):
        local = Split(0).put(w, rank, 4)
        local[max(0, 7 - 2 * rank) :] = 1e6
        run = lambda x, w: linear_cross_entropy(x, w, LABELS, par, vocab=7)  # noqa: E731
        (loss,), (grad, grad_weight) = vjp(run, [x, local], lambda _: [ct])
        close(loss, expected)
        close(grad, gx)
        return grad_weight

    close(Split(0).collect(on_ranks(4, main, AR), gw), gw)


def test_what_does_not_fit_is_an_error_that_names_it():
    x, w = tensors((2, 6, 3), (7, 3))
    message = (
        "linear_cross_entropy: x [2, 6, 3], a weight [7, 3] and labels [2, 5]; they are [batch, seq, embed], [vocab / tp, "
        "embed] and [batch, seq] of the whole sequence, here [2, 6]."
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        linear_cross_entropy(x, w, LABELS[:, 1:], RunPar(), vocab=7)
    with pytest.raises(DataError, match="label 6 at "):
        linear_cross_entropy(x, w[:6], LABELS, RunPar(), vocab=6)
