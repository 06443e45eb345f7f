"""The plan: where everything lies and what every gradient owes, without any process."""

from __future__ import annotations

import torch

import functional_par as fp
from functional_par import Input, Mesh, Model, Param

from .toys import odd, small_gpt


def owed(plan):
    """Axes larger than one that each leaf owes."""
    return {
        path: tuple(debt.axis for debt in spec.owes if plan.mesh.sizes[debt.axis] > 1)
        for path, spec in plan.specs.items()
    }


def four(mode="REDUCE_SCATTER", **options):
    return fp.tie("head.weight", "embed.weight"), fp.shard_tp(mode), fp.stage_pp(**options), fp.dp_reduce()


def test_a_leaf_tied_over_stages_owes_pp_and_the_data_axes_and_a_norm_the_tp_axis():
    plan = fp.compose(*four())(small_gpt()).plan(Mesh(dp=2, pp=2, tp=2))
    axes = owed(plan)
    assert axes["embed.weight"] == ("pp", "dp")
    assert axes["blocks.0.norm1.weight"] == ("dp", "tp")
    assert axes["blocks.0.attn.q.weight"] == ("dp",)
    assert axes["blocks.0.mlp.down.bias"] == ("dp", "tp")
    assert plan.specs["embed.weight"].owners == (0, 1)
    assert str(plan.specs["embed.weight"]) == "vocab@tp embed"


def test_a_leaf_may_owe_over_stages_data_and_tp_at_once():
    w = Param((4,), "embed")

    def use(p, x, par):
        h = par.slice(x, "tp", 1) * p
        return par.all_gather(h, "tp", 1, to="replicated")

    layers = [
        ("look_up", "table", lambda p, batch, par: p[batch["tokens"]]),
        ("x", "w", use),
        ("y", "w", use),
    ]
    model = Model({"table": Param((5, 4), "ids embed"), "w": w}, layers, lambda p, x, par: (x.sum(), x.shape[0]))
    plan = fp.compose(fp.shard_tp(), fp.stage_pp(split=[2, 1]), fp.dp_reduce())(model).plan(Mesh(pp=2, dp=2, tp=2))
    assert owed(plan) == {"table": ("dp",), "w": ("pp", "dp", "tp")}
    assert plan.specs["w"].payers(plan.mesh, 0) == tuple(range(8))


def test_a_debt_names_the_line_where_the_leaf_met_the_data():
    plan = fp.compose(fp.dp_reduce())(odd()).plan(Mesh(dp=2))
    debt = plan.specs["scale"].owes[-1]
    assert debt.axis == "dp"
    assert debt.layer == "join"
    assert 'return {"x": s["x"] + s["skip"] * p' in debt.place
    assert "toys.py:" in debt.place


def test_a_frozen_leaf_owes_nothing():
    plan = fp.compose(fp.dp_reduce(), fp.stage_pp())(odd(trainable_scale=False)).plan(Mesh(dp=2, pp=2))
    assert plan.specs["scale"].owes == ()
    assert not plan.specs["scale"].trainable


def test_leaves_belong_to_the_stages_that_read_them():
    plan = fp.compose(fp.stage_pp(split=[1, 1, 1, 1]))(small_gpt()).plan(Mesh(pp=4))
    assert plan.stage_leaves(0) == ("embed.weight", "position.weight")
    assert set(plan.stage_leaves(3)) == {"norm.weight", "norm.bias", "head.weight"}
    assert [layer.name for layer in plan.stage_layers(3)] == ["head", "loss"]
    held = [path for stage in range(4) for path in plan.stage_leaves(stage)]
    assert sorted(held) == sorted(plan.specs)


def test_costs_count_products_and_do_not_depend_on_the_mesh():
    program = fp.compose(fp.shard_tp(), fp.stage_pp())(small_gpt())
    one, many = program.plan(Mesh()), program.plan(Mesh(pp=2, tp=2))
    assert one.costs == many.costs
    assert one.costs["block0"] == one.costs["block1"] > one.costs["embed"] > 0
    assert list(one.costs) == ["embed", "block0", "block1", "head", "loss"]


def test_a_plan_keeps_the_trace_that_gave_it_its_debts(monkeypatch):
    plan = fp.compose(fp.shard_tp(), fp.dp_reduce())(small_gpt()).plan(fp.Mesh(dp=2, tp=2))
    monkeypatch.setattr("functional_par.plan.trace", None)
    assert plan.trace().debts["embed.weight"] == plan.specs["embed.weight"].owes


def test_a_trace_is_made_once_a_shape():
    plan = fp.compose(fp.dp_reduce())(small_gpt()).plan(Mesh())
    shapes = dict.fromkeys(("tokens", "labels"), ((3, 4), torch.int64))
    traced = plan.trace(shapes)
    assert plan.trace(dict(reversed(shapes.items()))) is traced
    assert plan.trace(shapes, torch.float64) is not traced
    assert traced.layers["block0"].output.shape == (3, 4, 8)
    assert plan.trace(shapes, torch.float64).layers["block0"].output.dtype == torch.float64


def test_the_example_has_a_size_for_every_free_dim():
    model = Model(
        {"w": Param((3,), "in")},
        [("x", "w", lambda p, batch, par: batch["x"][..., 0] @ p)],
        lambda p, x, par: (x.sum(), 1),
        {"x": Input((None, 3, None), torch.float32), "k": Input((None,))},
    )
    plan = fp.compose(fp.shard_tp())(model).plan(Mesh(tp=3))
    assert plan.example() == {"x": ((1, 3, 6), torch.float32), "k": ((1,), torch.int64)}


def test_the_summary_tells_the_choices():
    plan = fp.compose(*four(schedule="afab", microbatches=3))(small_gpt()).plan(Mesh(dp=2, pp=2))
    assert plan.summary() == {
        "stages": 2,
        "schedule": "afab",
        "microbatches": 3,
        "tp mode": "REDUCE_SCATTER",
        "async": False,
        "data axes": "ep+dp",
    }
    assert fp.compose()(small_gpt()).plan(Mesh()).summary()["tp mode"] == "none"


def test_plans_are_values():
    model = small_gpt()
    one, two = (fp.compose(*four())(model).plan(Mesh(dp=2, tp=2)) for _ in range(2))
    assert one == two
    one.trace(dict.fromkeys(("tokens", "labels"), ((2, 4), torch.int64)))
    assert one == two
    assert one != fp.compose(*four())(model).plan(Mesh(dp=2))
