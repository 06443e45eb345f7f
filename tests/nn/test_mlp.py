from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from functional_par.nn import gelu_mlp, swiglu_mlp

from .ranks import AR, RS, Split, calls, compare, every_kernel, every_mode, every_tp, on_ranks, shared, stream, tensors


@every_tp
@every_mode
@every_kernel
def test_gelu_mlp_equals_plain_torch(tp, mode, how):
    x, up, up_b, down, down_b = tensors((2, 12, 6), (24, 6), (24,), (6, 24), (6,))

    def split(par, x, up, up_b, down, down_b):
        params = {"up": {"weight": up, "bias": up_b}, "down": {"weight": down, "bias": down_b}}
        return gelu_mlp(params, x, par)

    compare(
        split,
        lambda x, up, up_b, down, down_b: F.linear(F.gelu(F.linear(x, up, up_b), approximate="tanh"), down, down_b),
        [(x, stream(mode)), (up, Split(0)), (up_b, Split(0)), (down, Split(1)), (down_b, shared(mode))],
        [stream(mode)],
        tp=tp,
        mode=mode,
        how=how,
    )


@every_tp
@every_mode
@every_kernel
def test_swiglu_mlp_equals_plain_torch(tp, mode, how):
    x, gate, up, down = tensors((2, 12, 6), (24, 6), (24, 6), (6, 24))

    def split(par, x, gate, up, down):
        return swiglu_mlp({"gate": {"weight": gate}, "up": {"weight": up}, "down": {"weight": down}}, x, par)

    def plain(x, gate, up, down):
        g = F.linear(x, gate)
        return F.linear(g / (1 + torch.exp(-g)) * F.linear(x, up), down)

    compare(
        split,
        plain,
        [(x, stream(mode)), (gate, Split(0)), (up, Split(0)), (down, Split(1))],
        [stream(mode)],
        tp=tp,
        mode=mode,
        how=how,
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(AR, {"all_reduce": 2}), (RS, {"all_gather": 2, "reduce_scatter": 2})],
    ids=["ar", "rs"],
)
@pytest.mark.parametrize("async_comm", [False, True])
def test_gate_and_up_share_one_entry(mode, expected, async_comm):
    x, gate, up, down = tensors((2, 4, 6), (5, 6), (5, 6), (6, 5))

    def main(par, rank):
        params = {"gate": {"weight": gate}, "up": {"weight": up}, "down": {"weight": down}}
        y, pull = torch.func.vjp(lambda x, params: swiglu_mlp(params, x, par), x, params)
        with torch.no_grad():
            pull(y)
        return calls(par)

    assert on_ranks(2, main, mode, async_comm=async_comm) == [expected] * 2
