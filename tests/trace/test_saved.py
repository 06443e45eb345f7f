"""What a layer keeps for its backward, counted in the trace: the bytes that autograd really keeps."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import functional_par as fp
from functional_par.pipeline.measure import measure
from functional_par.trace.saved import saved_bytes

from ..toys import odd, regression, small_gpt

TOKENS = {"tokens": (3, 4), "labels": (3, 4)}
ROWS = {"x": (5, 3), "y": (5,)}


def traced(model, batch, dtype):
    kinds = {name: given.dtype for name, given in model.batch.items()}
    fields = {name: (shape, dtype if kinds[name].is_floating_point else kinds[name]) for name, shape in batch.items()}
    layers = fp.compose()(model).plan(fp.Mesh()).trace(fields, dtype).layers
    return {name: layer.saved for name, layer in layers.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("model", "batch"), [(odd, TOKENS), (regression, ROWS)], ids=["odd", "regression"])
def test_layers_of_plain_operations_keep_just_the_bytes_that_the_trace_counts(model, batch, dtype):
    assert traced(model(), batch, dtype) == measure(model(), batch, dtype, rounds=1).saved


def test_kernels_keep_no_more_than_their_definitions_of_which_the_trace_tells():
    counted = traced(small_gpt(), TOKENS, torch.float32)
    real = measure(small_gpt(), TOKENS, rounds=1).saved
    assert counted.keys() == real.keys()
    assert all(real[name] <= counted[name] for name in real)
    assert real["head"] < 0.75 * counted["head"]


def test_bytes_grow_with_the_rows_and_shrink_with_the_shards():
    def block(mesh, rows):
        batch = dict.fromkeys(("tokens", "labels"), ((rows, 4), torch.int64))
        return fp.compose(fp.shard_tp())(small_gpt()).plan(mesh).trace(batch).layers["block0"].saved

    whole = block(fp.Mesh(), 3)
    assert block(fp.Mesh(), 6) == 2 * whole
    assert block(fp.Mesh(tp=2), 3) < whole


def test_each_storage_counts_once_and_what_is_apart_not_at_all():
    w, x = torch.ones(4, 4, requires_grad=True), torch.ones(3, 4)
    y = x @ w
    assert saved_bytes([y * y], [w]) == 4 * 12 + 4 * 12  # x for the product, y (twice the same) for the square
    assert saved_bytes([y * y], [w, x]) == 4 * 12
    assert saved_bytes([y.exp().view(12)]) == 4 * 12 + 4 * 12 + 0
    assert saved_bytes([x]) == 0


def test_what_a_hook_of_the_layer_keeps_in_another_form_is_not_brought_back():
    ran = []

    def inner(x):
        ran.append(1)
        return x.tanh().exp()

    x = torch.ones(3, requires_grad=True)
    assert saved_bytes([checkpoint(inner, x, use_reentrant=False)]) == 0
    assert ran == [1]
