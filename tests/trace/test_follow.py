"""The counting of work, and the second look at the backward."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import functional_par as fp
from functional_par.errors import ModelError
from functional_par.trace import Abstract, Value
from functional_par.trace.dual import Backward
from functional_par.trace.follow import Typing
from functional_par.trace.values import CONSTANT
from tests.trace.harness import model_of, param, program_of
from tests.trace.programs import RIGHT


def work_of(fn, params, rows=1):
    plan = program_of(model_of(fn, params)).plan(fp.Mesh())
    return plan.trace({"x": ((rows, 6, 6), torch.float64), "ids": ((rows, 6), torch.int64)}).layers["body"].work


def test_the_work_of_a_product_is_counted():
    square = {"g": param(6, 6)}
    assert work_of(lambda p, x, par: x @ p["g"], square, rows=3) == 2 * 3 * 6 * 6 * 6
    assert work_of(lambda p, x, par: x.mT.mT @ p["g"] @ p["g"], square, rows=3) == 2 * 2 * 3 * 6 * 6 * 6


def test_work_grows_with_rows_and_views_are_free():
    assert work_of(lambda p, x, par: x.mT.unsqueeze(0).expand(2, *x.shape)[0].mT, {}) == 0
    assert work_of(lambda p, x, par: x.tanh(), {}, rows=4) == 4 * work_of(lambda p, x, par: x.tanh(), {}) == 4 * 8 * 36
    assert work_of(lambda p, x, par: (x + 1).mul_(2), {}) == 2 * 8 * 36


def test_a_formula_that_does_not_know_its_arguments_is_left_out(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError("not these")

    for op in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
        monkeypatch.setitem(flop_registry, op, fails)
    assert work_of(lambda p, x, par: x @ p["g"], {"g": param(6, 6)}) == 8 * 36


def test_the_backward_adds_no_work():
    fn = RIGHT["routes"][1]
    params = RIGHT["routes"][0]
    frozen = {path: param(*leaf.shape, dims=leaf.dims, trainable=False) for path, leaf in params.items()}
    assert work_of(fn, params) == work_of(fn, frozen)


def test_a_gradient_that_the_operations_did_not_show_is_an_error():
    typing = Typing("layer")
    x = typing.input(Abstract((3,), torch.float64, Value(grad=True, data=True)))
    with typing:
        y = x * 2
        typing.known.note(y, CONSTANT)
        with pytest.raises(ModelError, match="a gradient which its operations do not show"):
            Backward(typing, [("x", x)], "layer 'layer'").check([(y, {})], {})


def test_a_layer_whose_own_operations_have_no_backward_on_meta_is_taken_at_its_forward(monkeypatch):
    def fails(*args, **kwargs):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch.autograd, "grad", fails)
    params, fn = RIGHT["views_chunks_and_masks"]
    assert program_of(model_of(fn, params)).plan(fp.Mesh(tp=2)).specs["body.up"].sharded == ("tp",)


def test_operations_of_torch_distributed_are_refused():
    typing = Typing("layer")
    x = typing.input(Abstract((3,), torch.float64))
    op = torch.ops._c10d_functional.all_reduce.default
    with typing, pytest.raises(ModelError, match="communicates behind the back of par"):
        op(x, "sum", "0")
