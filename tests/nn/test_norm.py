from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from functional_par.nn import layer_norm, rms_norm
from functional_par.run_par import RunPar

from .ranks import close, tensors


def plain_rms(x, w):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w


def test_layer_norm_works_without_a_bias():
    x, w = tensors((2, 5, 7), (7,))
    close(layer_norm(x, w, None, RunPar(), 1e-5), F.layer_norm(x, (7,), w, None, 1e-5))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_low_precision_is_computed_in_float32(fast, weight_dtype):
    par = RunPar(fast=fast)
    x, w, b = tensors((4, 512), (512,), (512,))
    x = (x * 100 + 1000).bfloat16()
    w, b = w.to(weight_dtype), b.to(weight_dtype)
    close(rms_norm(x, w, par, 1e-5), plain_rms(x.double(), w.double()).bfloat16(), 2 * torch.finfo(torch.bfloat16).eps)
    expected = F.layer_norm(x.double(), (512,), w.double(), b.double(), 1e-5)
    close(layer_norm(x, w, b, par, 1e-5), expected.bfloat16(), 2 * torch.finfo(torch.bfloat16).eps)
    (grad,) = torch.func.vjp(lambda x: rms_norm(x, w, par, 1e-5), x)[1](x)
    assert grad.dtype == torch.bfloat16
    assert rms_norm(x, w, par, 1e-5).dtype == layer_norm(x, w, b, par, 1e-5).dtype == torch.bfloat16


def test_the_fast_rms_norm_keeps_its_input_and_one_number_a_row():
    x, w = torch.randn(2, 5, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    kept = []

    def pack(x):
        kept.append(x)
        return x

    y = x * 1
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        rms_norm(y, w, RunPar())
    assert sorted(k.numel() for k in kept) == [7, 10, 70]


def test_second_derivatives_of_the_fast_rms_norm_are_right():
    x, w = tensors((3, 7), (7,))

    def slope(norm):
        return lambda x, w: sum(
            g.square().sum() for g in torch.func.grad(lambda *p: norm(*p).pow(3).sum(), (0, 1))(x, w)
        )

    for i in (0, 1):
        actual = torch.func.grad(slope(lambda x, w: rms_norm(x, w, RunPar(), 1e-5)), i)(x, w)
        close(actual, torch.func.grad(slope(plain_rms), i)(x, w))
    p, q = x.clone().requires_grad_(), w.clone().requires_grad_()
    first = torch.autograd.grad(rms_norm(p, q, RunPar(), 1e-5).pow(3).sum(), (p, q), create_graph=True)
    (actual,) = torch.autograd.grad(sum(g.square().sum() for g in first), p)
    close(actual, torch.func.grad(slope(plain_rms))(x, w))
