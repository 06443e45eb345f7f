"""A plan trains all of its model, or it is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import functional_par as fp
from functional_par import tree
from functional_par.errors import CompositionError
from functional_par.pipeline.whole import check_whole
from functional_par.step import Step

from .. import oracle
from ..toys import odd, small_gpt


def plan_of(model=None, pp=2, schedule="1f1b", chunks=None, **mesh):
    transforms = (fp.shard_tp(), fp.stage_pp(schedule, microbatches=4, chunks=chunks), fp.dp_reduce())
    return fp.compose(*transforms)(model or odd()).plan(fp.Mesh(pp=pp, **mesh))


@pytest.mark.parametrize(
    ("blocks", "pp", "schedule", "chunks"),
    [
        (28, 4, "1f1b", None),
        (5, 2, "afab", None),
        (3, 4, "1f1b", None),
        (29, 4, "interleaved", 2),
        (29, 4, "interleaved", 3),
        (29, 4, "zbv", None),
    ],
)
def test_all_layers_of_a_model_are_in_the_plan_on_any_number_of_stages(blocks, pp, schedule, chunks):
    plan = plan_of(small_gpt(blocks=blocks), pp, schedule, chunks)
    check_whole(plan)
    assert sum(map(len, plan.stages)) == blocks + 2


def test_shards_padding_ties_and_frozen_leaves_are_no_difference():
    tie = fp.tie("head.weight", "embed.weight")
    check_whole(
        fp.compose(tie, fp.shard_tp(), fp.stage_pp(), fp.dp_reduce())(small_gpt()).plan(fp.Mesh(dp=2, pp=2, tp=2))
    )
    check_whole(plan_of(odd(trainable_scale=False), tp=2))


def without(plan, path, **changes):
    specs = {p: replace(spec, **changes) if p == path else spec for p, spec in plan.specs.items()}
    return replace(plan, specs=specs)


BROKEN = {
    "lost": (
        lambda plan: replace(plan, stages=(("look_up",), ("hidden0", "head"))),
        "Mesh(pp=2): the model has 5 layers, but its 2 stages run 3: on no stage: mask, join. The stages together are the",
    ),
    "twice": (
        lambda plan: replace(plan, stages=(("look_up", "mask"), ("mask", "hidden0", "join", "head"))),
        "its 2 stages run 6: on two stages: mask.",
    ),
    "unknown": (
        lambda plan: replace(plan, stages=(("look_up", "mask", "x"), ("hidden0", "join", "head"))),
        "its 2 stages run 6: not in the model: x.",
    ),
    "order": (
        lambda plan: replace(plan, stages=(("mask", "look_up"), ("hidden0", "join", "head"))),
        "its 2 stages run 5: the order is another.",
    ),
    "placement": (
        lambda plan: replace(plan, placement=(0, 2)),
        "Mesh(pp=2): 2 stages lie on the pp coordinates [0, 2]. Each stage lies on one of 0 to 1.",
    ),
    "schedule": (
        lambda plan: replace(plan, placement=(1, 0)),
        "stages lie on the pp coordinates [1, 0], but schedule 1f1b runs them on [0, 1]. Take another schedule, or",
    ),
    "leaf": (
        lambda plan: replace(plan, specs={p: s for p, s in plan.specs.items() if p != "out"}),
        "the plan places 5 leaves, but the model has 6; only one of them has out.",
    ),
    "shape": (
        lambda plan: without(plan, "out", shape=(11, 5)),
        "the plan has out as [11, 5], but in the model it is [11, 6].",
    ),
    "frozen": (
        lambda plan: without(plan, "out", trainable=False),
        "the plan has out as frozen [11, 6], but in the model it is [11, 6].",
    ),
    "owner": (
        lambda plan: without(plan, "out", owners=(0,)),
        "out is read by stages on the pp coordinates [1], but held at [0].",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_leaves_something_out_is_refused_with_the_difference(name):
    breaks, words = BROKEN[name]
    with pytest.raises(CompositionError, match=re.escape(words)):
        check_whole(breaks(plan_of()))


def test_gradients_that_no_rank_reduces_are_refused_with_both_numbers(monkeypatch):
    from functional_par.pipeline import whole

    plan, real = plan_of(), whole.buckets
    lost = lambda bucket: replace(bucket, paths=tuple(p for p in bucket.paths if p != "scale"))  # noqa: E731
    monkeypatch.setattr(whole, "buckets", lambda *where: tuple(map(lost, real(*where))))
    words = "the ranks together have 239 gradients, but the model has 245 trainable elements; they differ in scale."
    with pytest.raises(CompositionError, match=re.escape(words)):
        check_whole(plan)


def tower(layers):
    """A list of small layers, each with a weight of its own; one is without."""

    def first(p, batch, par):
        return torch.tanh(batch["x"] @ p)

    def middle(p, x, par):
        return torch.tanh(x @ p) + x

    def bare(p, x, par):
        return x * 0.5

    weights = {f"w{i}": fp.Param((3, 3), "out in", fp.init.normal(0.4)) for i in range(layers) if i != 2}
    named = [(f"layer{i}", f"w{i}", middle if i else first) if i != 2 else ("layer2", [], bare) for i in range(layers)]
    batch = {"x": fp.Input((None, 3), torch.float64), "y": fp.Input((None, 3), torch.float64)}
    return fp.Model(
        weights, named, lambda p, x, par: ((x - par.batch["y"]).square().sum(), torch.tensor(len(x))), batch
    )


@pytest.mark.parametrize(
    ("layers", "pp", "schedule", "chunks"),
    [
        (30, 4, "1f1b", None),
        (7, 2, "1f1b", None),
        (5, 4, "afab", None),
        (31, 4, "interleaved", 3),
        (30, 4, "zbv", None),
    ],
)
def test_thirty_layers_on_four_stages_train_thirty_layers(layers, pp, schedule, chunks):
    model = tower(layers)
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(8, 3, generator=generator, dtype=torch.float64) for name in ("x", "y")}
    program = fp.compose(fp.stage_pp(schedule, microbatches=4, chunks=chunks))(model)
    ranks = oracle.train_on(program, fp.Mesh(pp=pp), [batch])
    oracle.equal_runs(ranks.run, oracle.train(model, [batch]))
    before = tree.flatten(model.init(0, torch.float64))
    assert len(ranks.run.weights) == layers - 1
    assert all((ranks.run.weights[path] != x).any() for path, x in before.items())


def test_a_step_of_a_plan_that_lost_a_layer_is_not_built():
    program = fp.compose(fp.stage_pp(microbatches=2))(tower(5))
    plan = program.plan(fp.Mesh(pp=2))
    broken = replace(plan, stages=(plan.stages[0], plan.stages[1][:-1]))

    def main(world):
        with pytest.raises(CompositionError, match="5 layers, but its 2 stages run 4: on no stage: layer4"):
            Step(broken, world, oracle.adamw())
        return True

    assert fp.run(main, fp.Mesh(pp=2), backend="threads") == [True, True]
