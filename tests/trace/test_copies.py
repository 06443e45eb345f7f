"""A sum over ranks that all hold the same is refused, however the value came to vary by its type."""

import pytest
import torch

import functional_par as fp


def program(layer, dims="ffn embed", mode="ALL_REDUCE"):
    """A model of two layers; ``dims`` names the dims of the first weight of the second."""
    params = {
        "embed": fp.Param((16, 8), "byte embed"),
        "w": {"up": fp.Param((12, 8), dims), "g": fp.Param((8,), "embed")},
    }

    def embed(p, x, par):
        return p[x["tokens"]]

    def loss(p, x, par):
        return (x**2).sum(), (par.batch["labels"] != -100).sum()

    model = fp.Model(params, [("embed", "embed", embed), ("layer", "w", layer)], loss)
    return fp.compose(fp.shard_tp(mode=mode), fp.dp_reduce())(model)


def mlp(p, x, par):
    hidden = (par.pvary(x, "tp") @ p["up"].T).relu()
    return p["g"] * (x + par.psum(hidden @ p["up"], "tp"))


def test_a_weight_that_is_cut_makes_a_sum_that_is_due():
    assert program(mlp).plan(fp.Mesh(dp=2, tp=2)).specs["w.up"].sharded == ("tp",)


def test_a_weight_whose_dim_shard_tp_does_not_know_is_found_at_its_sum():
    with pytest.raises(
        fp.SuperfluousCollective, match=r"test_copies.py:\d+: .*psum over tp of copies.*name that shard_tp cuts"
    ):
        program(mlp, dims="hidden embed")


def test_varying_and_summing_a_copy_is_refused():
    def layer(p, x, par):
        return p["g"] * par.psum(par.pvary(x, "tp"), "tp") + (0 * p["up"]).sum()

    with pytest.raises(fp.SuperfluousCollective, match=r"par\.psum over tp of copies"):
        program(layer, dims="other embed")


def test_a_gathered_value_is_a_copy_until_it_meets_a_cut_weight():
    def layer(p, x, par):
        whole = par.all_gather(par.slice(x, "tp", 1), "tp", 1)
        return (
            p["g"] * par.all_gather(par.reduce_scatter(whole, "tp", 1), "tp", 1, to="replicated") + (0 * p["up"]).sum()
        )

    with pytest.raises(fp.SuperfluousCollective, match=r"par\.reduce_scatter over tp of copies"):
        program(layer, dims="other embed")


def test_a_window_of_a_copy_differs():
    def layer(p, x, par):
        n = par.size("tp")
        window = par.take(par.pvary(x, "tp"), "tp", 2, tuple(range(0, 8, 8 // n)), 8 // n)
        return p["g"] * par.psum((window**2).sum(-1, keepdim=True), "tp") + (0 * p["up"]).sum()

    program(layer, dims="other embed").plan(fp.Mesh(tp=2))


def test_this_ranks_index_differs():
    def layer(p, x, par):
        mine = par.axis_index("tp") == 0
        return p["g"] * par.psum(torch.where(mine, par.pvary(x, "tp"), 0.0), "tp") + (0 * p["up"]).sum()

    program(layer, dims="other embed").plan(fp.Mesh(tp=2))
