"""What goes from which stage to which: straight from who made it to who reads it."""

from __future__ import annotations

import torch

import functional_par as fp
from functional_par import Mesh, Model, Param, init
from functional_par.pipeline.part import lanes, make_part
from functional_par.pipeline.routes import BATCH, Origin, routes
from functional_par.tree import flatten

from ..oracle import close, gradients, token_batch
from ..toys import VOCAB, odd

WIDE = init.normal(0.5)
WEIGHT = Param((4, 4), "out in", WIDE)


def routed(model, split):
    plan = fp.compose(fp.stage_pp(split=split))(model).plan(Mesh(pp=len(split)))
    return plan, routes(plan, plan.trace())


def test_a_leaf_goes_past_the_stages_that_do_not_read_it_and_a_field_of_the_batch_nowhere():
    plan, found = routed(odd(), [1, 1, 1, 1, 1])
    # Leaves in the order of the tree: x, skip, kept, ids, aux.
    assert found.inputs == (
        (Origin(BATCH, 0), Origin(BATCH, 1)),
        (Origin(0, 0), None, Origin(0, 2), None, None),
        (Origin(1, 0), None, None, None, None),
        (Origin(2, 0), Origin(0, 1), None, Origin(BATCH, 0), None),
        (Origin(3, 0), Origin(3, 1), Origin(0, 4)),
    )
    assert found.edges == ((0, 1), (0, 3), (0, 4), (1, 2), (2, 3), (3, 4))
    assert found.between(0, 3) == ((1, 1),)
    assert found.between(1, 3) == ()
    assert lanes(plan) == tuple(sorted({pair for a, b in found.edges for pair in ((a, b), (b, a))}))


def test_a_leaf_that_a_stage_reads_and_hands_on_carries_its_cotangent_through_that_stage():
    # In one stage of mask, hidden and join the kept are read; the skip is read by join alone.
    _, found = routed(odd(), [1, 3, 1])
    assert found.inputs[1] == (Origin(0, 0), Origin(0, 1), Origin(0, 2), Origin(BATCH, 0), None)
    assert found.inputs[2] == (Origin(1, 0), Origin(1, 1), Origin(0, 4))


def forked():
    """The first layer's value is handed on under two names, which two later layers read; one layer hands a value on that it
    reads; one drops what it gets; one value is read by nobody."""

    def start(p, batch, par):
        return {"x": batch["x"] @ p, "kept": batch["x"] * p.sum(), "lost": batch["x"] @ p.t()}

    def fork(p, s, par):
        return {"x": s["x"].tanh() @ p, "left": s["kept"], "right": s["kept"], "lost": s["lost"]}

    def left(p, s, par):
        return s | {"x": s["x"] @ p + s["left"].sin()}

    def reads(p, s, par):
        return s | {"x": s["x"] * s["right"].cos()}

    def right(p, s, par):
        return {"x": s["x"] @ p + s["right"].square()}

    def loss(p, s, par):
        return s["x"].square().sum(), torch.tensor(len(s["x"]))

    params = {"a": WEIGHT, "b": WEIGHT, "c": WEIGHT, "d": WEIGHT}
    layers = [
        ("start", "a", start),
        ("fork", "b", fork),
        ("left", "c", left),
        ("reads", [], reads),
        ("right", "d", right),
    ]
    return Model(params, layers, loss, {"x": fp.Input((None, 4), torch.float64)})


def test_cotangents_of_a_value_that_several_stages_read_are_added_up():
    model = forked()
    _, found = routed(model, [1, 1, 1, 1, 1])
    # The value is the second leaf of what the first stage returns; two stages read it, under two names, and the second of them
    # hands it on to the last.
    assert [inputs.count(Origin(0, 1)) for inputs in found.inputs] == [0, 0, 1, 1, 0]
    batch = {"x": torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))}
    params = flatten(model.init(0, torch.float64))
    loss, expected = gradients(model, params, batch)
    for name, split, pp in [("1f1b", [1, 1, 1, 1, 1], 5), ("zb-h1", [1, 2, 1, 1], 4), ("afab", [2, 1, 2], 3)]:
        program = fp.compose(fp.stage_pp(name, 3, split))(model)

        def main(world, program=program):
            step = program.step(world, fp.optim.sgd(lr=1.0), dtype=torch.float64, poison=True)
            moved, metrics = step(step.init(0), batch)
            return step.gather(moved), metrics["loss"]

        weights, found_loss = fp.run(main, Mesh(pp=pp), timeout=20.0)[0]
        close(torch.tensor(found_loss, dtype=torch.float64), loss, name)
        for path, x in flatten(weights).items():
            close(params[path] - x, expected[path], f"{name} {path}")


def test_a_part_has_the_stages_of_its_rank_and_what_each_message_carries():
    plan = fp.compose(fp.stage_pp("zbv", 2, [1, 1, 1, 2]))(odd()).plan(Mesh(pp=2))
    shapes = {name: ((2, 4), x.dtype) for name, x in token_batch(VOCAB, 4, 4).items()}

    def main(world):
        part = make_part(plan, world, shapes, torch.float64)
        sent = {
            str(m): [each.leaf.shape for each in part.carried[m.producer, m.consumer]]
            for task in part.tasks
            for m in task.sends
        }
        return sorted(part.chunks), sent

    (first, sent), (second, others) = fp.run(main, Mesh(pp=2))
    assert (first, second) == ([0, 3], [1, 2])
    assert sent["activations of microbatch 1 from stage 0 to stage 1"] == [(2, 4, 6), (2, 4)]
    assert sent["activations of microbatch 1 from stage 0 to stage 3"] == [(2, 4, 6), ()]
    assert sent["gradients of microbatch 0 from stage 3 to stage 2"] == [(2, 4, 6)]
    assert others["activations of microbatch 0 from stage 2 to stage 3"] == [(2, 4, 6)]
    assert "gradients of microbatch 0 from stage 1 to stage 0" in others
