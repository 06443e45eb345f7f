"""Each kind of wrong is told by the numbers alone."""

import pytest
import torch

import functional_par as fp
from functional_par.audit import numbers
from functional_par.audit.backward import classify
from functional_par.audit.observe import Case
from tests.audit.test_layout import normal, spread
from tests.audit.wrong import MLP, language_model, right_mlp

WHOLE = normal(4, 8)


def case(mesh, microbatches=1):
    program = fp.compose(fp.shard_tp(), fp.dp_reduce(), fp.stage_pp(microbatches=microbatches))
    plan = program(language_model(right_mlp, MLP)).plan(mesh)
    return Case(plan, {}, {"tokens": torch.zeros(8, 4)}, 0)


def parts(lie, n=2, scale=1.0):
    return [[part * scale for part in spread(WHOLE, lie, n, 3)]]


@pytest.mark.parametrize("lie", ["same", 1, "sum"])
def test_a_factor_is_found_in_every_layout(lie):
    assert numbers.factor_of(WHOLE, parts(lie, scale=3.0)) == pytest.approx(3.0)
    assert numbers.factor_of(WHOLE, parts(lie, scale=3.0) if lie == "sum" else [[WHOLE, -WHOLE * 2]]) != 1.0
    assert numbers.factor_of(WHOLE, [[normal(4, 8, seed=5), normal(4, 8, seed=6)]]) is None
    assert numbers.ratio(WHOLE, torch.zeros_like(WHOLE)) is None


def test_a_single_number_has_a_telling_factor_or_none():
    one = torch.ones((), dtype=torch.float64)
    assert numbers.factor_of(one, [[one * 3]]) == pytest.approx(3.0)
    assert numbers.factor_of(one, [[one / 4]]) == pytest.approx(0.25)
    assert numbers.factor_of(one, [[one * 0.0]]) == 0.0
    assert numbers.factor_of(one, [[one * 1.7]]) is None


def test_a_term_that_every_rank_adds_is_named():
    bias = normal(8, seed=9)
    grid = [[part + bias for part in spread(WHOLE, "sum", 3, 1)]]
    terms = {"other": normal(8, seed=10), "bias": bias}
    assert numbers.extra_term(WHOLE + bias, grid, "tp", terms) == "bias"
    assert numbers.extra_term(WHOLE - bias, [[p - 2 * bias for p in grid[0]]], "tp", terms) == "bias"
    assert numbers.extra_term(WHOLE + bias, grid, "rows", terms) is None
    assert numbers.extra_term(WHOLE, grid, "tp", {"other": terms["other"]}) is None
    assert numbers.lost_part(WHOLE + bias, [[WHOLE + bias / 4] * 4], "tp", terms) == "bias"


def test_the_chunk_of_the_first_rank_is_found_along_rows_and_tp():
    assert numbers.first_chunk(WHOLE, [[WHOLE[:, :4], WHOLE[:, :4]]]) == "tp"
    assert numbers.first_chunk(WHOLE, [[WHOLE[:2]], [WHOLE[:2]]]) == "rows"
    assert numbers.first_chunk(WHOLE, [[x[:, :4], x[:, :4]] for x in WHOLE.chunk(2)]) == "tp"
    assert numbers.first_chunk(WHOLE, parts(1)) == ""


def test_another_order_is_found():
    a, b = WHOLE.chunk(2, 1)
    assert numbers.another_order(WHOLE, [[b, a]])
    assert not numbers.another_order(WHOLE, [[a, b]])
    assert not numbers.another_order(WHOLE, [[a, 2 * b]])


def test_a_factor_is_named_after_the_axes_whose_size_it_is():
    plan = case(fp.Mesh(dp=2, tp=4), 4).plan
    assert numbers.axes_of_factor(4.0, plan) == ("tp", "microbatches")
    assert numbers.axes_of_factor(0.5, plan) == ("dp",)
    assert numbers.axes_of_factor(1.7, plan) == ()
    assert numbers.named_factor(4.0, plan, ("tp", "microbatches")) == "4 times (tp=4 or microbatches=4)"
    assert numbers.named_factor(0.5, plan, ("dp",)) == "0.5 times (1 / dp=2)"
    assert numbers.named_factor(1.7, plan, ()) == "1.7 times"


@pytest.mark.parametrize(
    ("grid", "kind", "axis"),
    [
        (parts("same", scale=2.0), "n times", "tp"),
        (parts("same", scale=1 / 3), "1/n", ""),
        (parts("same", scale=-1.0), "sign", ""),
        (parts("same", scale=0.0), "zero", ""),
        (parts("sum"), "sum missing", "tp"),
        ([[normal(4, 8, seed=5), torch.zeros(4, 8, dtype=torch.float64)]], "sum missing", "tp"),
        ([list(reversed(parts(1)[0]))], "another order", "tp"),
        ([[normal(4, 8, seed=5)] * 2], "differs", ""),
    ],
)
def test_a_wrong_cotangent_is_told(grid, kind, axis):
    said = classify(case(fp.Mesh(tp=2)), WHOLE, grid, True, "The cotangent is")
    assert (said.kind, said.axis) == (kind, axis)
    assert said.text.startswith("The cotangent is")


def test_a_cotangent_that_should_be_zero_is_told():
    said = classify(case(fp.Mesh(tp=2)), torch.zeros_like(WHOLE), [[WHOLE, WHOLE]], True, "The cotangent is")
    assert (said.kind, said.text) == ("differs", "The cotangent is not zero, though it should be.")
