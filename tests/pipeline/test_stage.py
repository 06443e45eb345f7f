"""A stage's layers as calls with a pullback."""

from __future__ import annotations

import re

import pytest
import torch

import functional_par as fp
from functional_par import Mesh, Model, ModelError, tree
from functional_par.pipeline.stage import stage_calls
from functional_par.run_par import RunPar
from functional_par.vjp import engine

from ..oracle import adamw, close, gradients, token_batch
from ..raises import matched
from ..toys import VOCAB, odd, regression

BATCH = token_batch(VOCAB, 6, 4)


def calls_of(model, batch, split):
    plan = fp.compose(fp.stage_pp(split=split))(model).plan(Mesh(pp=len(split)))
    traced = plan.trace({name: (tuple(x.shape), x.dtype) for name, x in batch.items()}, torch.float64)
    return [stage_calls(plan, traced, stage) for stage in range(len(split))]


def test_a_stage_has_its_layers_in_order_and_the_last_the_loss():
    calls = calls_of(odd(trainable_scale=False), BATCH, [1, 3, 1])
    assert [[call.layer.name for call in stage] for stage in calls] == [
        ["look_up"],
        ["mask", "hidden0", "join"],
        ["head", "loss"],
    ]
    mask, hidden, join = calls[1]
    assert (mask.trainable, mask.frozen) == ((), ())
    assert hidden.trainable == ("mlp.up", "mlp.down")
    assert (join.trainable, join.frozen) == ((), ("scale",))
    assert calls[2][-1].trainable == ("temperature",)


def test_edges_know_shapes_dtypes_and_what_carries_a_cotangent():
    calls = calls_of(odd(), BATCH, [1, 3, 1])
    edge = calls[0][-1].after
    # The running loss goes past the second stage, straight to the third.
    assert edge.without(frozenset({4})) == calls[1][0].before
    assert [(leaf.shape, leaf.dtype) for leaf in edge.leaves] == [
        ((6, 4, 6), torch.float64),
        ((6, 4, 6), torch.float64),
        ((6, 4), torch.bool),
        ((6, 4), torch.int64),
        ((), torch.float64),
    ]
    assert edge.differentiable == (True, True, False, False, True)
    assert calls[0][0].before.differentiable == (False, False)
    assert calls[2][-1].after.differentiable == (True, False)


@pytest.mark.parametrize("name", ["func", "tape"])
def test_the_pullbacks_of_all_calls_in_reverse_are_the_gradient(name):
    model = odd()
    params = tree.flatten(model.init(0, torch.float64))
    loss, expected = gradients(model, params, BATCH)
    par = RunPar(batch=BATCH)
    x, pulls = list(BATCH.values()), []
    (calls,) = calls_of(model, BATCH, [5])
    for call in calls:
        x, pull = call.forward(engine(name), params, x, par)
        pulls.append(pull)
    total, count = x
    close(total / count, loss)
    found = {}

    class Gradients:
        def add(self, grads):
            found.update(grads)

    cotangents = [torch.ones((), dtype=torch.float64) / count]
    for call, back in zip(reversed(calls), reversed(pulls), strict=True):
        cotangents = back(cotangents, Gradients(), None)
        assert len(cotangents) == sum(call.before.differentiable)
    assert cotangents == []
    assert found.keys() == expected.keys()
    for path, grad in expected.items():
        close(found[path], grad, path)


def stepping(change):
    """One step of a regression whose second layer returns something else once it runs."""
    base = regression()

    def second(p, x, par):
        y = x @ p
        return y if y.is_meta else change(y)

    model = Model(base.params, [base.layers[0], ("second", "second", second)], base.loss, base.batch)
    batch = {"x": torch.ones(4, 3, dtype=torch.float64), "y": torch.ones(4, dtype=torch.float64)}

    def main(world):
        step = fp.compose()(model).step(world, adamw(), dtype=torch.float64)
        step(step.init(0), batch)

    fp.run(main, Mesh())


def test_a_layer_that_returns_another_structure_than_when_traced_is_refused():
    message = "layer 'second' returned the structure"
    with pytest.raises(ModelError, match=message) as caught:
        stepping(lambda y: {"y": y})
    matched(caught.value, "a layer's output has the same structure at every call")


@pytest.mark.parametrize(
    ("change", "returned"),
    [(lambda y: y[:2], "torch.float64[2]"), (lambda y: y.float(), "torch.float32[4]")],
    ids=["shape", "dtype"],
)
def test_a_layer_that_returns_another_shape_or_dtype_than_when_traced_is_refused(change, returned):
    message = f"layer 'second' returned {returned}, but torch.float64[4] when it was traced; shapes are static."
    with pytest.raises(ModelError, match=re.escape(message)):
        stepping(change)
