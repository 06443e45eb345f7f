"""The model that the README writes from scratch, once right and with one mistake in each of five places: its parameters, the
first layer, a product by hand, a sum by hand, the loss. Composition or the audit tells each, with the line."""

import inspect

import pytest
import torch

import functional_par as fp

MESH = fp.Mesh(dp=2, pp=2, tp=2)


def embed(params, x, par):
    return x["features"] @ params["weight"].T


def mlp(params, x, par):
    hidden = par.pvary(x, "tp") @ params["up"].T
    return x + par.psum(hidden.relu() @ params["down"].T, "tp") + params["bias"]


def loss(params, x, par):
    return ((x.mean(-1) - par.batch["target"]) ** 2).sum(), len(x)


def block(down="embed ffn"):
    return {
        "up": fp.Param((64, 32), "ffn embed"),
        "down": fp.Param((32, 64), down),
        "bias": fp.Param((32,), "embed", fp.init.zeros()),
    }


def program(embed=embed, mlp=mlp, loss=loss, block=block):
    model = fp.Model(
        params={"embed": {"weight": fp.Param((32, 16), "embed feature")}, "mlp0": block(), "mlp1": block()},
        layers=[("embed", "embed", embed), ("mlp0", "mlp0", mlp), ("mlp1", "mlp1", mlp)],
        loss=loss,
        batch={"features": fp.Input((None, 16), torch.float32), "target": fp.Input((None,), torch.float32)},
        count=lambda batch: torch.tensor(len(batch["target"])),
    )
    return fp.compose(fp.shard_tp(), fp.stage_pp(microbatches=2), fp.dp_reduce())(model)


def line_of(fn):
    lines, start = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"test_five_mistakes.py:{start + offset}"


def only_finding(own):
    audit = fp.audit(own, MESH)
    (finding,) = audit.findings
    assert {difference.what for difference in audit.consequences} >= {"loss", "embed.weight"}
    return finding


def test_the_right_model_is_right():
    audit = fp.audit(program(), MESH)
    assert audit.ok, audit
    assert audit.findings == audit.consequences == ()
    audit.check()


def test_in_the_parameters_a_dim_under_the_name_of_another_is_told_at_composition():
    own = program(block=lambda: block(down="ffn embed"))
    with pytest.raises(fp.ParallelError, match="mlp0") as raised:
        fp.audit(own, MESH)
    assert "test_five_mistakes.py" in str(raised.value)


def test_in_the_first_layer_features_centred_over_the_rows_of_a_microbatch_are_found():
    def centred(params, x, par):
        features = x["features"] - x["features"].mean(0)  # here
        return features @ params["weight"].T

    finding = only_finding(program(embed=centred))
    assert (finding.kind, finding.layer, finding.axis) == ("depends on the other rows", "embed", "rows")
    assert line_of(centred) in finding.place
    assert "mean over dim 0, the rows" in finding.text


def test_in_a_product_by_hand_a_missing_pvary_is_told_at_composition():
    def without(params, x, par):
        hidden = x @ params["up"].T  # here
        return x + par.psum(hidden.relu() @ params["down"].T, "tp") + params["bias"]

    with pytest.raises(fp.MissingCollective, match=r"write par.pvary\(..., 'tp'\)") as raised:
        program(mlp=without)
    assert line_of(without) in str(raised.value)


def test_in_a_sum_by_hand_a_bias_that_every_rank_adds_is_found():
    def inside(params, x, par):
        hidden = par.pvary(x, "tp") @ params["up"].T
        return x + par.psum(hidden.relu() @ params["down"].T + params["bias"], "tp")  # here

    finding = only_finding(program(mlp=inside))
    assert (finding.kind, finding.layer, finding.also) == ("added before the sum", "mlp0", ("mlp1",))
    assert (finding.axis, finding.stage) == ("tp", 0)
    assert line_of(inside) in finding.place
    assert "leaf mlp0.bias, whole on every rank, is added to a partial sum" in finding.text
    assert finding.advice.startswith("par.psum(partial, 'tp') + mlp0.bias")


def test_in_the_loss_a_mean_in_place_of_the_sum_is_found():
    def mean(params, x, par):
        return ((x.mean(-1) - par.batch["target"]) ** 2).mean(), len(x)  # here

    finding = only_finding(program(loss=mean))
    assert (finding.kind, finding.layer, finding.stage) == ("depends on the other rows", "loss", 1)
    assert line_of(mean) in finding.place
    assert "return (sum, count)" in finding.advice
