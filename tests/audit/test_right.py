"""What is right has no finding: the library's models in both modes, a model of all that one may do, adapters, other layouts."""

from dataclasses import replace

import pytest
import torch

import functional_par as fp
from tests import toys
from tests.audit.wrong import MLP, TP, language_model, right_mlp, whole_embed, whole_head

MESHES = [fp.Mesh(), fp.Mesh(tp=2), fp.Mesh(dp=2, pp=2, tp=2)]
STRIPES = [0, 2, 1, 3]


def program(model, *transforms, mode="ALL_REDUCE", microbatches=2, async_comm=False):
    own = [fp.shard_tp(mode, async_comm), fp.stage_pp(microbatches=microbatches), fp.dp_reduce(), *transforms]
    return fp.compose(*own)(model)


def ok(own, mesh, **options):
    audit = fp.audit(own, mesh, **options)
    assert audit.ok, audit
    return audit


@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_a_tied_gpt_is_right(mode):
    own = program(toys.small_gpt(blocks=1), fp.tie("head.weight", "embed.weight"), mode=mode, async_comm=True)
    for mesh in MESHES:
        audit = ok(own, mesh)
        assert str(audit).startswith(
            f"audit on {mesh}: ok\ncompared: loss, 20 gradients, values and cotangents of 4 layers"
        )


@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_a_llama_is_right(mode):
    own = program(toys.small_llama(blocks=1, kv_heads=1), mode=mode)
    for mesh in (fp.Mesh(tp=2), fp.Mesh(dp=2, pp=3)):
        ok(own, mesh)


def test_dropout_and_padding_are_right():
    model = fp.models.gpt(7, 8, 1, 2, 4, d_ff=8, init_std=0.2, dropout=0.3)
    for mode in ("ALL_REDUCE", "REDUCE_SCATTER"):
        ok(program(model, mode=mode), fp.Mesh(dp=2, tp=2))


def test_skips_integers_auxiliary_losses_and_frozen_leaves_are_right():
    for mesh in MESHES:
        ok(program(toys.odd(trainable_scale=False)), mesh)
    ok(program(toys.regression()), fp.Mesh(dp=2))


def test_a_batch_of_ones_own_is_taken():
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(6, 3, generator=generator), "y": torch.randn(6, generator=generator)}
    audit = ok(program(toys.regression(), microbatches=3), fp.Mesh(dp=2), batch=batch)
    assert "on 6 rows in 6 pieces (2 replicas * 3 microbatches)" in audit.compared
    assert not audit.notes


def test_adapters_are_right_though_their_second_factor_starts_at_zero():
    def leaves(path, w):
        return {
            "w": replace(w, trainable=False),
            "a": fp.Param((2, w.shape[1]), f"rank {w.names[1]}", fp.init.normal(0.5)),
            "b": fp.Param((w.shape[0], 2), f"{w.names[0]} rank", fp.init.zeros()),
        }

    lora = fp.reparam("*.up", "*.down", leaves=leaves, value=lambda p, par: p["w"] + p["b"] @ p["a"])
    for mesh in (fp.Mesh(dp=2, tp=2), fp.Mesh(pp=2)):
        ok(program(language_model(right_mlp, MLP), lora), mesh)


def test_other_data_axes_and_uneven_stages_are_right():
    own = fp.compose(fp.shard_tp(), fp.stage_pp(microbatches=3, split=[1, 4]), fp.dp_reduce())(toys.odd())
    ok(own, fp.Mesh(ep=2, pp=2, dp=2))


def test_maps_on_gradients_are_left_out_and_named():
    rough = fp.on_local_gradients(lambda g, leaf: leaf.psum(g.bfloat16(), *leaf.owes).to(g.dtype), name="rough")
    audit = ok(program(language_model(right_mlp, MLP), rough), fp.Mesh(dp=2))
    assert audit.notes == ("left out, since they may be approximate on purpose: on_local_gradients(rough)",)


def test_a_value_that_lies_in_no_known_way_is_no_finding_where_loss_and_gradients_are_right():
    def striped(p, x, par):
        x = right_mlp(p, x, par)
        return par.slice(x[:, torch.tensor(STRIPES)], "tp", 1)

    def joined(p, x, par):
        return par.all_gather(x, "tp", 1, to="replicated")[:, torch.tensor(STRIPES)] @ p.T

    model = language_model(striped, MLP)
    params = {name: leaf for name, leaf in model.params.items() if name != "after"}
    layers = [("embed", "table", whole_embed), ("mlp", "mlp", striped), ("head", "out", joined)]
    ok(program(replace(model, params=params, layers=layers)), fp.Mesh(dp=2, tp=2))


def test_of_two_odd_layers_the_one_that_stays_wrong_is_told():
    def striped(p, x, par):
        return par.slice(right_mlp(p, x, par)[:, torch.tensor(STRIPES)], "tp", 1)

    def joined(p, x, par):
        x = par.all_gather(x, "tp", 1, to="replicated")[:, torch.tensor(STRIPES)]
        return x + par.psum((par.pvary(x, "tp") @ p["up"].T).tanh() @ p["down"].T / par.size("tp"), "tp")

    model = language_model(striped, MLP)
    layers = [
        ("embed", "table", whole_embed),
        ("mlp", "mlp", striped),
        ("after", "after", joined),
        ("head", "out", whole_head),
    ]
    (finding,) = fp.audit(program(replace(model, layers=layers)), TP).findings
    assert (finding.layer, finding.kind, finding.ratio) == ("after", "1/n", 0.5)


def test_a_derivative_that_is_not_one_on_purpose_may_stay():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.round()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, ct):
            return ct

    def rounded(p, x, par):
        return right_mlp(p, Straight.apply(x * 4), par)

    own = program(language_model(rounded, MLP))
    (finding,) = fp.audit(own, TP).findings
    assert finding.kind == "not the derivative"
    ok(own, TP, derivatives=False)
