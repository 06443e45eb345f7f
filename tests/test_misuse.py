"""Mistakes of a user's script that would otherwise pass, or fail without a word of help."""

import re
from functools import cache

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import functional_par as fp

TEXT = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TEXT[:, :-1].contiguous(), "labels": TEXT[:, 1:].contiguous()}


@cache
def program(**sizes):
    model = fp.models.gpt(**{"vocab": 16, "d_model": 8, "n_layers": 2, "n_heads": 2, "seq_len": 8, **sizes})
    return fp.compose(fp.shard_tp(), fp.stage_pp(), fp.dp_reduce())(model)


def one_step(world, optimizer=None, seed=0, batch=BATCH, **options):
    step = program().step(world, optimizer or fp.optim.sgd(lr=0.1), **options)
    return step(step.init(seed), batch)


@pytest.mark.parametrize("mesh", [fp.Mesh(dp=2), fp.Mesh(tp=2), fp.Mesh(pp=2)], ids=str)
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_ranks_with_other_seeds_or_rates_are_told(mesh, norm):
    for differing in (
        lambda world: one_step(world, seed=world.rank, norm=norm),
        lambda world: one_step(world, fp.optim.sgd(lr=0.1 * (1 + world.rank)), norm=norm),
        lambda world: one_step(world, clip=1.0 + world.rank, norm=norm),
    ):
        with pytest.raises(fp.StateError, match="the ranks do not take the same step"):
            fp.run(differing, mesh)


def test_replicas_with_other_numbers_of_rows_are_told():
    def main(world):
        rows = 8 if world.rank == 0 else 4
        return one_step(world, batch={name: x[:rows] for name, x in BATCH.items()})

    with pytest.raises(fp.StateError, match="number and shape of rows"):
        fp.run(main, fp.Mesh(dp=2))


def test_a_state_of_another_optimizer_is_refused_by_name():
    def main(world):
        state = program().step(world, fp.optim.adamw(lr=0.1)).init(0)
        program().step(world, fp.optim.sgd(lr=0.1, momentum=0.9))(state, BATCH)

    with pytest.raises(fp.StateError, match=r"it has exp_avg, exp_avg_sq, but sgd keeps momentum"):
        fp.run(main, fp.Mesh())


def test_a_state_of_another_shape_or_dtype_is_refused_by_leaf():
    def wider(world):
        state = program(d_model=16).step(world, fp.optim.sgd(lr=0.1)).init(0)
        program().step(world, fp.optim.sgd(lr=0.1))(state, BATCH)

    def double(world):
        state = program().step(world, fp.optim.sgd(lr=0.1), dtype=torch.float64).init(0)
        program().step(world, fp.optim.sgd(lr=0.1))(state, BATCH)

    with pytest.raises(fp.StateError, match=re.escape("embed.weight is torch.float32[16, 16], but this step has")):
        fp.run(wider, fp.Mesh())
    with pytest.raises(fp.StateError, match=re.escape("embed.weight is torch.float64[16, 8]")):
        fp.run(double, fp.Mesh())


def test_options_of_the_wrong_kind_are_refused():
    with pytest.raises(fp.CompositionError, match=r"step\(optimizer='adam'\): it is one of fp.optim"):
        fp.run(lambda world: one_step(world, "adam"), fp.Mesh())
    with pytest.raises(fp.MeshError, match=r"the second argument is an fp\.Mesh"):
        fp.run(one_step, 2)
    with pytest.raises(fp.CommError, match="timeout=-1"):
        fp.run(one_step, fp.Mesh(), timeout=-1)


def user_model(layer):
    params = {"embed": fp.Param((16, 8), "byte embed"), "up": fp.Param((12, 8), "ffn embed")}

    def start(p, x, par):
        return {}

    def embed(p, x, par):
        return p["embed"][par.batch["tokens"]]

    def loss(p, x, par):
        return (x**2).sum(), (par.batch["labels"] != -100).sum()

    return fp.Model(params, [("start", [], start), ("embed", ["embed"], embed), ("layer", "up", layer)], loss)


def mlp(w, x, par):
    return x + par.psum((par.pvary(x, "tp") @ w.T).tanh() @ w, "tp")


def test_a_stage_may_send_nothing():
    compose = fp.compose(fp.stage_pp(split=[1, 1, 1]), fp.dp_reduce(), fp.shard_tp())(user_model(mlp))

    def main(world):
        step = compose.step(world, fp.optim.sgd(lr=0.1), dtype=torch.float64)
        return step(step.init(0), BATCH)[1]["loss"]

    assert fp.run(main, fp.Mesh(pp=3)) == fp.run(main, fp.Mesh()) * 3


def test_checkpointing_under_torch_func_names_the_engine_that_can():
    def layer(w, x, par):
        return checkpoint(lambda x: mlp(w, x, par), x, use_reentrant=False)

    compose = fp.compose(fp.dp_reduce())(user_model(layer))

    def main(world, engine):
        step = compose.step(world, fp.optim.sgd(lr=0.1), engine=engine)
        return step(step.init(0), BATCH)[1]["loss"]

    with pytest.raises(fp.ModelError, match='engine="tape"'):
        fp.run(lambda world: main(world, "func"), fp.Mesh())
    assert fp.run(lambda world: main(world, "tape"), fp.Mesh())[0] > 0
