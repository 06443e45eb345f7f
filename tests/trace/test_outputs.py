"""What layers and losses may return."""

import pytest
import torch

import functional_par as fp
from functional_par.errors import MissingCollective, ModelError, SuperfluousCollective
from functional_par.model import Model
from tests.trace.harness import FIELDS, column, enter, judge, model_of, param, program_of, total


@pytest.mark.parametrize(
    ("output", "shown"), [(None, "None of type NoneType"), (3, "3 of type int"), ("name", "'name' of type str")]
)
@pytest.mark.parametrize("wrap", [lambda x, y: y, lambda x, y: (x, y), lambda x, y: {"a": x, "b": [y]}])
def test_a_layer_that_returns_anything_but_tensors_is_refused(output, shown, wrap):
    def layer(p, x, par):
        return wrap(x, output)

    with pytest.raises(ModelError, match=rf"layer 'body', trace/test_outputs.py:\d+.*it returns {shown}"):
        program_of(model_of(layer, {}))


def test_a_layer_may_return_any_tree_of_tensors():
    def split(p, x, par):
        return {"a": (x, [par.batch["ids"]]), "empty": ()}

    def join(p, x, par):
        y, (ids,) = x["a"]
        return y * p + ids.unsqueeze(-1)

    judge(model_of(split, {"g": param(6)}, after=[("join", "body.g", join)]), fp.Mesh(dp=2, pp=2)).check()


PAIR = r"layer 'loss', trace/test_outputs.py:\d+.*returns a pair \(sum, count\) whose "


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: None, "sum is a float tensor without dims"),
        (lambda x: x.sum(), "sum is a float tensor without dims"),
        (lambda x: [x.sum(), 3], "sum is a float tensor without dims"),
        (lambda x: (x.sum(), 3, 4), "sum is a float tensor without dims"),
        (lambda x: (x.sum(-1), 3), "sum is a float tensor without dims"),
        (lambda x: (3.0, 3), "sum is a float tensor without dims"),
        (lambda x: (x.sum().to(torch.int64), 3), "sum is a float tensor without dims"),
        (lambda x: (x.sum(), None), "count is an integer or a tensor without dims, not None"),
        (lambda x: (x.sum(), "3"), "count is an integer or a tensor without dims, not '3'"),
        (lambda x: (x.sum(), x[0]), r"count is an integer or a tensor without dims, not a tensor of shape \[6, 6\]"),
    ],
)
def test_a_loss_that_is_not_a_sum_and_a_count_is_refused(output, message):
    with pytest.raises(ModelError, match=PAIR + message):
        program_of(model_of(lambda p, x, par: x * p["g"], {"g": param(6)}, lambda p, x, par: output(x)))


def loss_of(fn):
    leaves = {"enter": {"w": param(6, 6)}, "up": column()}
    return program_of(Model(leaves, [("enter", "enter", enter)], (["up"], fn), FIELDS))


def test_a_loss_without_a_parameter_is_refused():
    with pytest.raises(ModelError, match=r"layer 'loss'.*does not depend on any trainable parameter"):
        loss_of(lambda p, x, par: (par.batch["x"].sum() + x.detach().sum() + p["up"].detach().sum(), 1))


def test_a_loss_that_differs_along_tp_is_refused():
    with pytest.raises(MissingCollective, match=r"layer 'loss'.*the loss differs along tp.*par.psum\(x, 'tp'\)"):
        loss_of(lambda p, x, par: ((par.pvary(x, "tp") @ p["up"].T).sum(), 1))


def test_a_count_that_differs_along_tp_is_refused():
    def loss(p, x, par):
        return x.sum() + par.psum(p["up"].sum(), "tp"), par.slice(par.batch["ids"], "tp", 1).sum()

    with pytest.raises(MissingCollective, match=r"layer 'loss'.*the count differs along tp.*par.psum\(count, 'tp'\)"):
        loss_of(loss)


def test_a_loss_that_was_summed_over_dp_is_refused_since_the_step_adds_it_up():
    def loss(p, x, par):
        return par.psum(x.sum() + par.psum(p["up"].sum(), "tp"), "ep", "dp"), 1

    with pytest.raises(
        SuperfluousCollective, match=r"the loss is the same on every rank of ep and dp.*ep \* dp times too"
    ):
        loss_of(loss)


def test_a_loss_of_weights_that_were_summed_over_dp_is_refused():
    def loss(p, x, par):
        return par.psum(par.pvary(par.psum(p["up"].sum(), "tp"), "dp"), "dp"), 1

    with pytest.raises(SuperfluousCollective, match=r"par\.psum over dp of copies"):
        loss_of(loss)


def test_without_dp_reduce_a_sum_over_dp_is_nothing():
    model = model_of(lambda p, x, par: x * p["g"], {"g": param(6)}, lambda p, x, par: (par.psum(x.sum(), "dp"), 1))
    assert fp.compose(fp.shard_tp())(model).plan(fp.Mesh(tp=2)).specs["body.g"].owes == ()


@pytest.mark.parametrize("count", [4, torch.tensor(4), torch.tensor(4.0)])
def test_a_count_is_a_number_or_a_tensor(count):
    judge(
        model_of(lambda p, x, par: x * p["g"], {"g": param(6)}, lambda p, x, par: (total(p, x, par)[0], count)),
        fp.Mesh(),
    ).check()
