from __future__ import annotations

import pytest
import torch

from functional_par.nn import swiglu_mlp

from .ranks import AR, RS, calls, on_ranks, tensors


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
