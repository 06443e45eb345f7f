"""Correct programs are accepted, and their gradients, after the debts are paid, are the plain function's."""

import pytest
import torch

import functional_par as fp
from functional_par.model import Model
from tests.trace.harness import FIELDS, enter, judge, model_of, param, total
from tests.trace.programs import MLP, RIGHT, down, up

every_program = pytest.mark.parametrize("name", RIGHT)


@every_program
def test_a_correct_program_is_accepted_and_right_on_three_ranks(name):
    params, fn = RIGHT[name]
    judge(model_of(fn, params), fp.Mesh(tp=3), engine="tape", rows=2).check()


@pytest.mark.deep
@every_program
def test_a_correct_program_is_accepted_and_right_over_dp_and_tp(name):
    params, fn = RIGHT[name]
    judge(model_of(fn, params), fp.Mesh(dp=2, tp=2)).check()


OVER_DP = [
    "routes",
    "attends_with_few_key_heads",
    "differentiates_an_energy",
    "varies_a_parameter_over_the_data_axes",
    "shards_a_parameter_over_dp_by_hand",
    "contrasts_each_row_with_all_rows",
    "scales_partial_and_whole_with_one_leaf",
    "sums_over_padding",
]


@pytest.mark.parametrize("name", OVER_DP)
def test_a_program_is_right_over_dp_and_tp_with_microbatches(name):
    params, fn = RIGHT[name]
    microbatches = 1 if name.startswith("contrasts") else 2
    judge(model_of(fn, params), fp.Mesh(dp=2, tp=2), microbatches=microbatches).check()


def pass_parameters_on(p, x, par):
    return {"x": x, "g": p["g"], "twice": 2 * p["g"], "s": p["s"], "ids": par.batch["ids"], "sum": (x.mean(), p["h"])}


def test_parameters_may_travel_to_the_layer_where_they_meet_data():
    def meet(p, x, par):
        partial = par.pvary(x["x"], "tp")[..., :1] * x["s"].sum() * x["twice"]
        mean, bias = x["sum"]
        return par.psum(partial, "tp") + mean + bias * x["ids"].unsqueeze(-1)

    params = {"g": param(6), "h": param(6), "s": param(6, dims="ffn")}
    model = model_of(pass_parameters_on, params, after=[("meet", "enter", meet)])
    for mesh in (fp.Mesh(tp=3), fp.Mesh(pp=2, tp=2)):
        judge(model, mesh).check()
    owed = {path: [debt.axis for debt in spec.owes] for path, spec in judge(model, fp.Mesh(tp=2)).plan.specs.items()}
    assert owed["body.g"] == ["ep", "dp", "tp"]
    assert owed["body.h"] == ["ep", "dp"]
    assert owed["body.s"] == ["ep", "dp"]


def test_the_gradient_of_a_leaf_read_by_two_layers_over_two_stages_is_right_when_both_owe_the_same():
    def scale(p, x, par):
        return par.psum(up(p, x, par) @ p["down"].T * p["g"], "tp")

    second = ("again", {"g": "body.g", "up": "body.up", "down": "body.down"}, scale)
    judge(model_of(scale, {"g": param(6), **MLP}, after=[second]), fp.Mesh(pp=2, tp=2)).check()


def test_tied_leaves_owe_together():
    def scale(p, x, par):
        return par.psum(up(p, x, par) @ p["down"].T * p["g"], "tp")

    model = model_of(scale, {"g": param(6), "h": param(6), **MLP})
    again = ("again", {"g": "body.h", "up": "body.up", "down": "body.down"}, scale)
    model = Model(model.params, [*model.layers, again], total, FIELDS)
    judge(model, fp.Mesh(tp=2), ties=[("body.g", "body.h")]).check()


def test_a_loss_with_split_parameters_and_a_regulariser_that_every_row_pays_is_right():
    def loss(p, x, par):
        kept = par.psum(p["body"]["up"].square().sum(), "tp") + p["body"]["g"].square().sum()
        return total({}, down(p["body"], up(p["body"], x, par), par), par)[0] + len(x) * kept, len(x)

    model = model_of(lambda p, x, par: x * p["g"], {"g": param(6), **MLP})
    model = Model(model.params, model.layers, (["body"], loss), FIELDS)
    judge(model, fp.Mesh(dp=2, tp=2)).check()


def test_a_loss_of_parameters_alone_has_its_debts():
    def loss(p, x, par):
        mine = torch.where(par.axis_index("tp") == 0, p["g"], 0.0)
        return par.psum(mine.square().sum() * len(par.batch["x"]), "tp"), len(par.batch["x"])

    leaves = {"enter": {"w": param(6, 6)}, "g": param(6)}
    model = Model(leaves, [("enter", "enter", enter)], ({"g": "g"}, loss), FIELDS)
    verdict = judge(model, fp.Mesh(dp=2, tp=3))
    verdict.check()
    assert [debt.axis for debt in verdict.plan.specs["g"].owes] == ["ep", "dp", "tp"]


def test_a_leaf_that_meets_nothing_owes_nothing_and_gets_no_gradient():
    verdict = judge(model_of(lambda p, x, par: x * p["g"].detach(), {"g": param(6)}), fp.Mesh(dp=2, tp=2))
    verdict.check()
    assert verdict.plan.specs["body.g"].owes == ()


def test_collectives_along_axes_without_a_transform_are_the_identity():
    params, fn = RIGHT["scales_partial_and_whole_with_one_leaf"]
    plan = fp.compose(fp.dp_reduce())(model_of(fn, params)).plan(fp.Mesh(dp=2))
    assert [debt.axis for debt in plan.specs["body.g"].owes] == ["ep", "dp"]
    plan = fp.compose()(model_of(fn, params)).plan(fp.Mesh())
    assert plan.specs["body.g"].owes == ()


def test_padding_stays_zero_over_steps():
    params, fn = RIGHT["sums_over_padding"]
    program = fp.compose(fp.shard_tp())(model_of(fn, params))
    batch = {"x": torch.randn(2, 6, 6, dtype=torch.float64), "ids": torch.zeros(2, 6, dtype=torch.int64)}

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=0.01), dtype=torch.float64)
        state, losses = step.init(0), []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append((metrics["loss"], metrics["grad_norm"]))
        return losses

    alone = torch.tensor(fp.run(main, fp.Mesh())[0], dtype=torch.float64)
    split = torch.tensor(fp.run(main, fp.Mesh(tp=3))[0], dtype=torch.float64)
    torch.testing.assert_close(split, alone, rtol=1e-10, atol=1e-10)
