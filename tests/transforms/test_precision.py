"""``precision``: what is computed, added up, sent and kept in which dtype; and what each of them is good for."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import pytest
import torch

import functional_par as fp
from functional_par import CompositionError, Mesh, Model, Param, StateError
from functional_par.pipeline.memory import stage_memory
from functional_par.precision import Precision
from functional_par.testing.layout import Layout
from functional_par.tree import flatten

from ..oracle import token_batch
from ..raises import matched
from ..toys import regression, small_gpt, small_llama

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
UNIT = 2.0**-8
"""Relative rounding error of bfloat16, at most."""


@pytest.mark.parametrize(
    ("arguments", "kinds", "words"),
    [
        ({}, (BF16, F32, F32, F32), "bfloat16, accumulate, reduce and master in float32"),
        ({"compute": "fp32"}, (F32, F32, F32, F32), "float32"),
        ({"compute": F64}, (F64, F64, F64, F64), "float64"),
        ({"reduce": "bf16"}, (BF16, F32, BF16, F32), "bfloat16, accumulate and master in float32"),
        ({"accumulate": "bf16"}, (BF16, BF16, BF16, F32), "bfloat16, master in float32"),
        ({"master": "bfloat16"}, (BF16, F32, F32, BF16), "bfloat16, accumulate and reduce in float32"),
        ({"compute": "float32", "master": "float64", "accumulate": "f64"}, (F32, F64, F64, F64), "float32, accu"),
    ],
    ids=["default", "float32", "float64", "reduce", "accumulate", "master", "wider"],
)
def test_what_is_not_said_is_in_float32_or_better(arguments, kinds, words):
    plan = fp.compose(fp.precision(**arguments))(regression()).plan(Mesh())
    assert plan.precision == Precision(*kinds)
    assert str(plan.precision).startswith(words)
    explained = str(fp.compose(fp.precision(**arguments))(regression()).explain(Mesh()))
    assert (f"precision         {plan.precision}\n" in explained) == (words != "float32")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("float16",), "precision(compute='float16': gradients in float16 underflow without loss scaling"),
        ((F32, "int8"), "precision(accumulate='int8': it is one of float32, float64, bfloat16."),
        ((F32, F32, 3), "precision(reduce=3: it is one of float32"),
        (
            ("f32", None, None, BF16),
            "precision(compute=torch.float32, master=torch.bfloat16): the parameters are the master's rounded",
        ),
    ],
)
def test_what_a_dtype_cannot_be_is_refused(arguments, words):
    with pytest.raises(CompositionError, match=re.escape(words)):
        fp.precision(*arguments)


def on_one(program, work, mesh=None, **options):
    """``work(step)`` on the first rank."""

    def main(world):
        return work(program.step(world, options.pop("optimizer", None) or fp.optim.adamw(1e-2), **options))

    return fp.run(main, mesh or Mesh(), backend="threads", timeout=60.0)[0]


def test_the_dtype_of_a_step_is_that_of_the_program_and_never_another():
    said = fp.compose(fp.precision("bf16"))(regression())
    assert on_one(said, lambda step: step.dtype) == BF16
    assert on_one(said, lambda step: step.precision, dtype=BF16) == Precision.of(BF16)
    assert on_one(fp.compose()(regression()), lambda step: step.precision) == Precision.of(F32)
    with pytest.raises(CompositionError) as caught:
        on_one(said, lambda step: step.dtype, dtype=F32)
    matched(caught.value, "step(dtype=torch.float32): fp.precision of this program says bfloat16, accumulate")


def buffers(mesh, **arguments):
    """Dtypes of parameters, gradients and slots, bytes of the gradients that were sent, and what the plan says of them."""
    program = fp.compose(fp.precision(**arguments), fp.dp_reduce(), fp.stage_pp(microbatches=2))(small_gpt())

    def main(world):
        step = program.step(world, fp.optim.adamw(1e-2), donate=True)
        state, _ = step(step.init(0), token_batch(13, 8, 4))
        sent = sum(n for (phase, _, _), n in world.record.nbytes.items() if phase == "gradients")
        kinds = {slot: {x.dtype for x in leaves.values()} for slot, leaves in state.flat_opt.items()}
        held = (
            sum(x.nbytes for x in state.flat.values()),
            sum(x.nbytes for s in state.flat_opt.values() for x in s.values()),
        )
        return {x.dtype for x in state.flat.values()}, {x.dtype for x in step._kept.flat}, kinds, sent, held

    (memory,) = stage_memory(program.plan(mesh))
    return *fp.run(main, mesh, backend="threads")[0], (memory.parameters, memory.state)


def test_every_buffer_has_the_dtype_that_was_said_and_the_plan_counts_it():
    n = sum(prod(leaf.shape) for leaf in small_gpt().leaves.values())
    for arguments, compute, total, wire, master in (
        ({}, BF16, F32, F32, F32),
        ({"accumulate": "bf16"}, BF16, BF16, BF16, F32),
        ({"reduce": "bf16", "master": "bf16"}, BF16, F32, BF16, None),
        ({"compute": "f32", "master": "f64"}, F32, F32, F32, F64),
    ):
        params, grads, slots, sent, held, counted = buffers(Mesh(dp=2), **arguments)
        assert (params, grads) == ({compute}, {total})
        assert slots.pop("master", {None}) == {master}
        assert all(kinds == {torch.promote_types(master or compute, F32)} for kinds in slots.values())
        assert n * wire.itemsize <= sent < n * wire.itemsize + 16 * wire.itemsize * len(small_gpt().leaves)
        assert held == counted


def gradients_of(model, mesh, *transforms, batch, **arguments):
    program = fp.compose(fp.precision(**arguments), *transforms)(model)

    def main(world):
        step = program.step(world, fp.optim.sgd(0.0, momentum=0.5))
        state, metrics = step(step.init(0), batch)
        return metrics["loss"], flatten(step.gather_opt(state)["momentum"])

    return fp.run(main, mesh, backend="threads", timeout=60.0)[0]


def test_a_layout_in_bfloat16_is_one_process_but_for_roundings_of_what_it_cuts():
    """Over data and stages each row is computed alike, and gradients of weights are products in float32: what differs is the
    gradient of norms and biases, rounded once a microbatch. Over tp partial sums are rounded before they are added."""
    batch = token_batch(13, 8, 4)
    for model in (small_gpt(), small_llama()):
        loss, expected = gradients_of(model, Mesh(), batch=batch)
        split = fp.dp_reduce(), fp.stage_pp("zb-h1", microbatches=2), fp.shard_tp(mode="REDUCE_SCATTER")
        for mesh, limit in ((Mesh(dp=2, pp=2), 4 * UNIT), (Mesh(tp=2, pp=2), 8 * UNIT)):
            other, found = gradients_of(model, mesh, *split, batch=batch)
            assert abs(other - loss) <= (1e-6 if mesh.tp == 1 else UNIT) * abs(loss)
            for path, want in expected.items():
                worst = (found[path] - want).abs().max()
                products = mesh.tp == 1 and path.endswith("weight") and "norm" not in path and "position" not in path
                assert worst <= (1e-5 if products else limit) * want.abs().max().clamp(min=4e-3), (mesh, path)


@pytest.mark.parametrize("donate", [False, True])
def test_slices_of_the_master_and_updates_by_maps_are_those_of_the_whole(donate):
    def trained(mesh, *transforms, steps=3):
        program = fp.compose(fp.precision(), *transforms)(small_gpt())

        def main(world):
            step = program.step(world, fp.optim.adamw(1e-2), donate=donate, clip=1.0)
            state = step.init(0)
            for seed in range(steps):
                state, _ = step(state, token_batch(13, 4, 4, seed))
            return flatten(step.gather(state)), flatten(step.gather_opt(state)["master"])

        params, masters = fp.run(main, mesh, backend="threads", timeout=60.0)[0]
        for path, x in masters.items():
            assert (x.dtype, params[path].dtype) == (F32, BF16)
            assert torch.equal(x.to(BF16), params[path]), path
        return masters

    whole = trained(Mesh(dp=2), fp.dp_reduce())
    for zero in (1, 2, 3):
        for path, x in trained(Mesh(dp=2), fp.dp_reduce(zero=zero)).items():
            torch.testing.assert_close(x, whole[path], rtol=1e-5, atol=1e-6)
    still = trained(Mesh(), fp.on_updates(lambda update, leaf: update * 0.0, "head.weight"), steps=1)
    drawn = trained(Mesh(), steps=0)
    for path, x in trained(Mesh(), steps=1).items():
        if path == "head.weight":
            assert torch.equal(still[path], drawn[path])
        else:
            torch.testing.assert_close(still[path], x, rtol=1e-6, atol=1e-7)


def test_initial_values_are_drawn_in_the_dtype_of_the_master():
    program, wide = fp.compose(fp.precision())(small_gpt()), flatten(small_gpt().init(3))
    params, masters = on_one(
        program,
        lambda step: (step.gather(s := step.init(3)), step.gather_opt(s)["master"]),
        optimizer=fp.optim.sgd(0.1),
    )
    for path, x in wide.items():
        assert torch.equal(flatten(masters)[path], x)
        assert torch.equal(flatten(params)[path], x.to(BF16))


def test_a_state_goes_on_in_any_precision_and_layout_with_its_master():
    model, batch = small_gpt(), token_batch(13, 4, 4)
    adamw = fp.optim.adamw(1e-2)
    kinds = {"bf16": fp.precision(), "float32": fp.precision("float32"), "bare": fp.precision(master="bf16")}

    def saved(name):
        def work(step):
            state, _ = step(step.init(0), batch)
            return step.gather(state), step.gather_opt(state)

        return on_one(fp.compose(kinds[name])(model), work)

    def loaded(name, params, opt, mesh=Mesh(dp=2), zero=1):  # noqa: B008
        def work(step):
            state = step.load(params, opt, step=1)
            return flatten(step.gather(state)), {k: flatten(x) for k, x in step.gather_opt(state).items()}

        return on_one(fp.compose(kinds[name], fp.dp_reduce(zero=zero))(model), work, mesh, optimizer=adamw)

    params, opt = saved("bf16")
    again, slots = loaded("bf16", params, opt, zero=3)
    masters = flatten(opt["master"])
    for path, x in masters.items():
        assert torch.equal(slots["master"][path], x)
        assert torch.equal(again[path], x.to(BF16))
    wide, slots = loaded("float32", params, opt)  # the master becomes the parameters
    assert set(slots) == {"exp_avg", "exp_avg_sq"}
    assert all(torch.equal(wide[path], x) for path, x in masters.items())
    params, opt = saved("float32")  # and the other way round
    again, slots = loaded("bf16", params, opt)
    assert all(torch.equal(slots["master"][path], x) for path, x in flatten(params).items())
    assert all(torch.equal(again[path], x.to(BF16)) for path, x in flatten(params).items())
    narrow, slots = loaded("bare", params, opt)
    assert set(slots) == {"exp_avg", "exp_avg_sq"}
    assert all(torch.equal(narrow[path], x.to(BF16)) for path, x in flatten(params).items())
    _, slots = loaded("bf16", params, None)
    assert all(torch.equal(slots["master"][path], x) for path, x in flatten(params).items())


def test_parameters_of_another_state_than_their_master_are_refused():
    def work(step):
        state = step.init(0)
        params = step.gather(state)
        params["head"]["weight"] = params["head"]["weight"] + 1
        step.load(params, step.gather_opt(state), step=0)

    with pytest.raises(StateError) as caught:
        on_one(fp.compose(fp.precision())(small_gpt()), work)
    matched(
        caught.value, "load(params, opt): head.weight is not the rounded value of opt['master'], from which the next"
    )


def test_the_norm_of_narrow_gradients_is_worked_out_in_float32():
    def work(step):
        state, metrics = step(step.init(0), token_batch(13, 4, 4))
        grads = flatten(step.gather_opt(state)["momentum"]).values()
        return metrics["grad_norm"], torch.cat([x.double().flatten() for x in grads]).norm().item()

    program = fp.compose(fp.precision(accumulate="bf16"))(small_gpt())
    found, expected = on_one(program, work, optimizer=fp.optim.sgd(0.0, momentum=0.5))
    assert abs(found - expected) < 1e-5 * expected


def test_proofs_are_of_the_function_without_its_roundings():
    mesh, others = Mesh(dp=2), (fp.dp_reduce(), fp.precision())
    program = fp.compose(*others)(small_gpt())
    exact = program.exact
    assert exact.plan(mesh).precision is None
    assert exact.exact is exact
    fp.testing.assert_equivalent(program, mesh)
    assert fp.audit(program, mesh, derivatives=False).ok
    assert Layout(mesh).program(small_gpt(), *others).plan(mesh).precision is None


def test_a_slot_of_that_name_is_in_the_way():
    sgd = fp.optim.sgd(0.1)
    with pytest.raises(StateError) as caught:
        on_one(fp.compose(fp.precision())(regression()), lambda step: 0, optimizer=replace(sgd, slots=("master",)))
    matched(caught.value, "optimizer sgd: a slot 'master' of its own is in the way of fp.precision's.")


def net(width=8):
    def forward(p, batch, par):
        return fp.nn.row_linear(fp.nn.column_linear(batch["x"], p["w"], par).tanh(), p["v"], par)

    some = fp.init.normal(0.3)
    return model_of({"w": Param((16, width), "ffn in", some), "v": Param((1, 16), "out ffn", some)}, forward, width)


def line(width=8, start=fp.init.zeros()):  # noqa: B008
    def forward(p, batch, par):
        return fp.nn.column_linear(batch["x"], p["w"], par)

    return model_of({"w": Param((1, width), "out in", start)}, forward, width)


def model_of(leaves, forward, width):
    def loss(p, y, par):
        return (y.float() - par.batch["y"].float()).square().sum(), torch.tensor(len(y))

    batch = {"x": fp.Input((None, 1, width), F32), "y": fp.Input((None, 1, 1), F32)}
    return Model({"net": leaves}, [("net", "net", forward)], loss, batch)


def noisy(seed, rows, steps, teacher, width=8):
    """Rows of one corpus in an order of their own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2048, 1, width, generator=generator)
    y = teacher(x) + 0.5 * torch.randn(2048, 1, 1, generator=generator)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(seed)).repeat(-(-steps * rows // 2048))
    return [{"x": x[ids], "y": y[ids]} for ids in order[: steps * rows].split(rows)]


def losses(model, batches, microbatches, lr, **arguments):
    program = fp.compose(fp.precision(**arguments), fp.stage_pp(microbatches=microbatches))(model)

    def work(step):
        state, found = step.init(0), []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(metrics["loss"])
        return torch.tensor(found, dtype=F64)

    return on_one(program, work, optimizer=fp.optim.sgd(lr), engine="tape", donate=True)


def noise(runs):
    """How far apart runs are whose data come in different orders."""
    return runs.amax(0) - runs.amin(0)


def test_bfloat16_that_accumulates_in_float32_tracks_float32_within_the_noise_of_seeds():
    def smooth(seed, **arguments):
        batches = noisy(seed, 16, 200, lambda x: 2 * (x.sum(-1, keepdim=True) - 4).tanh())
        return losses(net(), batches, 2, 0.1, **arguments).view(10, 20).mean(1)

    exact = torch.stack([smooth(seed, compute="float32") for seed in (1, 2, 3)])
    assert exact[:, -1].max() < 0.9 * exact[:, 0].min()  # it learns
    assert ((smooth(1) - exact[0]).abs() < noise(exact)).all()


def test_accumulation_in_bfloat16_fails_to_track():
    """A thousand gradients of one sign: the sum stands still where an addend is less than half a unit of its last place."""

    def loss_after_a_step(seed, microbatches, **arguments):
        first, second = noisy(seed, 1024, 2, lambda x: x.sum(-1, keepdim=True))
        program = fp.compose(fp.precision(**arguments), fp.stage_pp(microbatches=microbatches))(line())
        whole = fp.compose(fp.precision(**arguments))(line())

        def main(world):
            step, other = (each.step(world, fp.optim.sgd(0.05), engine="tape") for each in (program, whole))
            state, _ = step(step.init(0), first)
            return other.evaluate(state, second)["loss"]

        return torch.tensor(fp.run(main, Mesh(), backend="threads")[0])

    exact = torch.stack([loss_after_a_step(seed, 1, compute="float32") for seed in (1, 2, 3)])
    assert (loss_after_a_step(1, 1024) - exact[0]).abs() < noise(exact)
    assert (loss_after_a_step(1, 1024, accumulate="bf16") - exact[0]).abs() > 2 * noise(exact)


def test_without_a_master_small_updates_are_lost():
    """Weights in [0.5, 1] whose last place is 2**-8; of 8 updates each is a fifth of that, and all go the same way."""
    batches = noisy(0, 16, 8, lambda x: 0.0 * x.sum(-1, keepdim=True))

    def moved(**arguments):
        def work(step):
            state = step.init(0)
            before = step.gather(state)["net"]["w"]
            for batch in batches:
                state, _ = step(state, batch)
            return (step.gather(state)["net"]["w"] != before).float().mean()

        model = line(start=fp.init.uniform(0.5, 1.0))
        return on_one(fp.compose(fp.precision(**arguments))(model), work, optimizer=fp.optim.sgd(2.5e-4))

    assert moved(master="bf16") == 0.0
    assert moved() == 1.0
