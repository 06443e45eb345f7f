"""``assert_equivalent`` passes what is right, and says of what is wrong by how much and by which factor."""

import pytest
import torch

import functional_par as fp

TEXT = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TEXT[:, :-1].contiguous(), "labels": TEXT[:, 1:].contiguous()}
MESHES = [fp.Mesh(), fp.Mesh(tp=2), fp.Mesh(dp=2), fp.Mesh(dp=2, pp=2, tp=2)]


def compose(model, microbatches=1, mode="ALL_REDUCE"):
    return fp.compose(fp.shard_tp(mode=mode), fp.stage_pp(microbatches=microbatches), fp.dp_reduce())(model)


def user_model(layer):
    params = {
        "embed": fp.Param((16, 8), "byte embed", fp.init.normal(1.0)),
        "mlp": {
            "up": fp.Param((12, 8), "ffn embed", fp.init.normal(0.5)),
            "down": fp.Param((8, 12), "embed ffn", fp.init.normal(0.5)),
            "bias": fp.Param((8,), "embed", fp.init.normal(0.5)),
        },
    }

    def embed(p, x, par):
        return p[x["tokens"]]

    def loss(p, x, par):
        return (x**2).sum(), (par.batch["labels"] != -100).sum()

    return fp.Model(params, [("embed", "embed", embed), ("mlp", "mlp", layer)], loss)


def right(p, x, par):
    hidden = (par.pvary(x, "tp") @ p["up"].T).relu()
    return x + par.psum(hidden @ p["down"].T, "tp") + p["bias"]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_the_librarys_own_models_are_equivalent(mesh, mode):
    model = fp.models.gpt(vocab=16, d_model=8, n_layers=2, n_heads=2, seq_len=8)
    fp.testing.assert_equivalent(compose(model, microbatches=2, mode=mode), mesh, BATCH)


def test_a_models_own_layer_that_is_right_passes():
    fp.testing.assert_equivalent(compose(user_model(right)), fp.Mesh(dp=2, tp=2), BATCH)


def test_a_bias_inside_the_sum_is_found():
    def wrong(p, x, par):
        hidden = (par.pvary(x, "tp") @ p["up"].T).relu()
        return x + par.psum(hidden @ p["down"].T + p["bias"], "tp")

    program = compose(user_model(wrong))
    fp.testing.assert_equivalent(program, fp.Mesh(dp=2), BATCH)
    with pytest.raises(
        AssertionError, match=r"on Mesh\(tp=2\) the program is not .*\n  loss: off by .*\n.*gradient of embed"
    ):
        fp.testing.assert_equivalent(program, fp.Mesh(tp=2), BATCH)


def test_a_factor_is_named():
    def doubled(p, x, par):
        return right(p, x, par) * par.size("tp")

    found = {d.what: d.ratio for d in fp.testing.differences(compose(user_model(doubled)), fp.Mesh(tp=2), BATCH)}
    assert found["loss"] == pytest.approx(4.0)
    assert found["mlp.bias"] == pytest.approx(4.0)


def test_a_loss_that_depends_on_how_the_batch_is_cut_is_found():
    def normed(p, x, par):
        y = right(p, x, par)
        return y - y.mean(0)

    program = compose(user_model(normed), microbatches=2)
    with pytest.raises(AssertionError, match="loss: off by"):
        fp.testing.assert_equivalent(program, fp.Mesh(), BATCH)


def test_floating_point_fields_are_widened():
    params = {"w": fp.Param((4, 3), "embed feature", fp.init.normal(1.0))}

    def layer(w, x, par):
        return x["features"] @ w.T

    def loss(p, x, par):
        return ((x.sum(-1) - par.batch["target"]) ** 2).sum(), len(x)

    fields = {"features": fp.Input((None, 3), torch.float32), "target": fp.Input((None,), torch.float32)}
    model = fp.Model(params, [("w", "w", layer)], loss, fields, lambda batch: torch.tensor(len(batch["target"])))
    numbers = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    program = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(model)
    fp.testing.assert_equivalent(program, fp.Mesh(dp=2), {"features": numbers, "target": numbers.sum(-1)})
