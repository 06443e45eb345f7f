"""Layers that run again in backward: the same bits in every layout, and nothing is kept but what the policy says."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import functional_par as fp
from functional_par import Model, ModelError, Param
from functional_par.pipeline.back import Uses
from functional_par.pipeline.products import POLICIES, PRODUCTS
from functional_par.step import Step
from functional_par.testing.strategies import layouts
from functional_par.tree import flatten

from ..oracle import token_batch
from ..properties.examples import few
from ..toys import odd, small_llama
from .test_deferred import Single, Sums
from .uses import every_use

MODELS = {
    "gpt": fp.models.gpt(13, 8, 2, 4, 4, d_ff=8, init_std=0.2, dropout=0.3),
    "llama": small_llama(),
    "odd": odd(),
}
MODES = ("ALL_REDUCE", "REDUCE_SCATTER")
both_engines = pytest.mark.parametrize("name", ["func", "tape"])


def gradients_of(plans, batch, **options):
    """Losses and gradients of two steps of each plan; the learning rate is 0. In the first step each layer finds out how it
    uses its leaves."""

    def main(world):
        found = []
        for plan in plans:
            step = Step(plan, world, fp.optim.sgd(lr=0.0, momentum=0.5), dtype=torch.float64, **options)
            state = step.init(0)
            for _ in range(2):
                moved, metrics = step(state, batch)
                found.append((metrics["loss"], flatten(step.gather_opt(moved)["momentum"])))
        return found

    return fp.run(main, plans[0].mesh, backend="threads", timeout=60.0)[0]


def with_policies(single, policy):
    """The same layers, about which nothing is known yet, with another policy."""
    other = copy(single)
    other.calls = tuple(replace(call, policy=policy, uses=Uses()) for call in single.calls)
    return other


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(MODELS)))
    names = [layer.name for layer in MODELS[name].all_layers]
    each = {layer: draw(st.sampled_from(POLICIES)) for layer in names}
    policy = draw(st.sampled_from([*POLICIES[1:], each, each]))
    modes = MODES if name in ("gpt", "llama") else MODES[:1]
    return MODELS[name], draw(layouts(MODELS[name], modes=modes, ties=name == "gpt")), policy, draw(st.booleans())


@few(8, 0.4)
@given(cases())
def test_gradients_have_the_same_bits_in_every_layout_engine_and_schedule(case):
    model, layout, policy, poison = case
    plan = layout.program(model, fp.remat(policy)).plan(layout.mesh)
    plan.trace(dict.fromkeys(("tokens", "labels"), ((2, 4), torch.int64)), torch.float64)
    plain = replace(plan, remat={})
    batch = token_batch(7, 2 * layout.pieces, 4)
    (loss, grads), *others = gradients_of([plain, plan], batch, engine=layout.engine, poison=poison)
    for other, again in others:
        assert other == loss
        for path, grad in grads.items():
            assert torch.equal(again[path], grad), path


@both_engines
def test_leaves_used_in_every_way_get_the_same_bits_at_once_and_later(name):
    single = Single(every_use(), token_batch(7, 4, 4), name)
    plain, *others = (with_policies(single, policy) for policy in POLICIES)
    for later in (None, []):
        expected = plain.round()
        for other in others:
            found = other.round(later)
            while later:
                later.pop(0).add_to(found)
            assert found.written == expected.written
            for path in expected.written:
                assert torch.equal(found.leaves[path], expected.leaves[path]), path


def watched(runs, also=lambda x, w: 0.0):
    """A model whose second layer computes three products and a tanh, which its backward needs, and writes to the memory of one
    of the products. ``runs`` notes each run."""

    def first(p, batch, par):
        return p[batch["tokens"]]

    def block(p, x, par):
        if not x.is_meta:
            runs.append(x.shape)
        h = fp.nn.column_linear(x, p["w"], par).tanh()
        grown = (h.detach() @ p["v"]).exp_()
        return x + fp.nn.row_linear(h + grown, p["w"], par) + also(x, p["v"])

    def loss(p, x, par):
        kept = par.batch["labels"] != -100
        return (x.square().sum(-1) * kept).sum(), kept.sum()

    wide = fp.init.normal(0.3)
    square = Param((4, 4), "out in", wide)
    params = {"table": Param((7, 4), "ids embed", wide), "block": {"w": square, "v": square}}
    return Model(params, [("first", "table", first), ("block", "block", block)], loss)


class Operations(TorchDispatchMode):
    """Counts the matrix products that are computed, and knows of each tanh whether its memory is still alive."""

    def __init__(self):
        super().__init__()
        self.products, self.tanhs = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func in PRODUCTS
        if func is torch.ops.aten.tanh.default:
            self.tanhs.append(StorageWeakRef(out.untyped_storage()))
        return out

    def alive(self):
        return [not ref.expired() for ref in self.tanhs]


@both_engines
def test_a_layer_runs_twice_and_computes_its_products_once_where_they_are_kept(name):
    done = {}
    for policy in POLICIES:
        runs = []
        single = with_policies(Single(watched(runs), token_batch(7, 4, 4), name), policy)
        single.round()  # in which the layer learns
        runs.clear()
        with Operations() as seen:
            single.round()
        done[policy] = len(runs), seen.products
    products = done["none"][1]
    assert done == {"none": (1, products), "full": (2, products + 3), "selective": (2, products)}


@both_engines
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_outlives_its_use(name, policy):
    """What a layer computes is alive from its run to the end of its backward, in the first call, which learns, as in others;
    what is kept to run it again, until then."""
    single = with_policies(Single(watched([]), token_batch(7, 4, 4), name), policy)
    for _ in range(2):
        sums = Sums(single.leaves)
        with Operations() as seen:
            (total, _), backs = single.forward()
            assert seen.alive() == [policy == "none"]
            (cotangent,) = backs.pop()([torch.ones_like(total)], sums, None)
            back = backs.pop()
            kept = [] if policy == "none" else [StorageWeakRef(x.untyped_storage()) for x in back.held()]
            assert len(kept) == {"none": 0, "full": 1, "selective": 1 + 3}[policy]
            (cotangent,) = back([cotangent], sums, None)
            del back
        assert seen.alive() == [False] * (1 if policy == "none" else 2)
        assert all(ref.expired() for ref in kept)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(2, 1, "no more instead of mm of [16, 4], [4, 4]"), (1, 2, "mm of [16, 4], [4, 4] instead of no more")],
)
def test_a_layer_that_computes_other_products_when_it_runs_again_is_refused(first, second, words):
    runs = []

    def also(x, w):
        for _ in range(first if len(runs) == 1 else second):
            x = x @ w
        return x

    single = with_policies(Single(watched(runs, also), token_batch(7, 4, 4)), "selective")
    message = (
        f"layer 'block', whose matrix products are kept (remat), computed other products when it ran again: {words}."
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        single.round()


def test_an_evaluation_keeps_nothing_and_runs_once():
    runs = []
    program = fp.compose(fp.remat("selective"))(watched(runs))

    def main(world):
        step = program.step(world, fp.optim.sgd(0.1))
        runs.clear()
        return step.evaluate(step.init(0), token_batch(7, 4, 4))

    fp.run(main, fp.Mesh(), backend="threads")
    assert len(runs) == 1
