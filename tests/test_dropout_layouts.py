"""Dropout follows from seed, step and global position: a model with dropout trains alike in every layout."""

import functools

import pytest
import torch

import functional_par as fp
from functional_par import tree
from functional_par.errors import ModelError
from functional_par.run_par import RunPar, step_key

from . import oracle

ROWS, SEQ, VOCAB, STEPS, SEED, RATE, LR = 12, 8, 13, 2, 5, 0.1, 0.3


def model_of(name, rate=RATE):
    if name == "gpt":
        return fp.models.gpt(VOCAB, 8, 3, 4, SEQ, d_ff=8, init_std=0.2, dropout=rate)
    return fp.models.llama(VOCAB, 8, 3, 4, SEQ, n_kv_heads=2, d_ff=8, init_std=0.2, dropout=rate)


@functools.cache
def batches():
    return [oracle.token_batch(VOCAB, ROWS, SEQ, seed) for seed in range(STEPS)]


@functools.cache
def one_process(name, rate=RATE):
    """Plain gradient descent on the plain function, which is told seed and step by its key alone."""
    model, run = model_of(name, rate), oracle.Run()
    params = tree.flatten(model.init(SEED, torch.float64))
    for step, batch in enumerate(batches()):
        leaves = {path: x.detach().requires_grad_() for path, x in params.items()}
        loss = model(tree.unflatten(leaves), batch, RunPar(batch=batch, key=step_key(SEED, step)))
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        run.losses.append(loss.item())
        run.norms.append(oracle.norm_of(grads))
        run.tokens.append(int(model.count_terms(batch)))
        params = {path: x - LR * grads[path] for path, x in params.items()}
    run.weights = params
    return run


def train_on(name, mesh, mode="ALL_REDUCE", microbatches=1, schedule="1f1b", rate=RATE, **options):
    program = fp.compose(fp.shard_tp(mode), fp.stage_pp(schedule, microbatches), fp.dp_reduce())(model_of(name, rate))
    return oracle.train_on(program, mesh, batches(), fp.optim.sgd(LR), SEED, **options).run


LAYOUTS = [
    (fp.Mesh(), "ALL_REDUCE", 1),
    (fp.Mesh(), "ALL_REDUCE", 4),
    (fp.Mesh(pp=2), "ALL_REDUCE", 3),
    (fp.Mesh(dp=3), "ALL_REDUCE", 2),
    (fp.Mesh(ep=2, dp=2), "ALL_REDUCE", 1),
    (fp.Mesh(tp=4), "REDUCE_SCATTER", 1),
    (fp.Mesh(dp=2, pp=2, tp=2), "ALL_REDUCE", 1),
    (fp.Mesh(dp=2, pp=2, tp=2), "REDUCE_SCATTER", 3),
]


@pytest.mark.parametrize(
    ("name", "mesh", "mode", "microbatches"),
    [("gpt", *layout) for layout in LAYOUTS] + [("llama", *layout) for layout in LAYOUTS[1::3]],
    ids=str,
)
def test_training_with_dropout_equals_one_process_in_every_layout(name, mesh, mode, microbatches):
    oracle.equal_runs(train_on(name, mesh, mode, microbatches), one_process(name))


def test_a_pipeline_changes_no_bit_of_training_with_dropout():
    runs = [
        train_on("gpt", mesh, microbatches=3, schedule=schedule)
        for mesh, schedule in [(fp.Mesh(), "1f1b"), (fp.Mesh(pp=2), "1f1b"), (fp.Mesh(pp=2), "afab")]
    ]
    oracle.same_bits(runs[1], runs[0])
    oracle.same_bits(runs[2], runs[0])


def test_both_engines_and_donate_drop_the_same():
    runs = [train_on("gpt", fp.Mesh(), **chosen) for chosen in ({"engine": "func"}, {"engine": "tape", "donate": True})]
    oracle.same_bits(runs[1], runs[0])


def test_dropout_changes_what_is_learned():
    assert abs(one_process("gpt").losses[0] - one_process("gpt", 0.0).losses[0]) > 1e-4


def probe(rate=0.5):
    """Two layers of one function, whose masks the loss reads; the parameter weighs the rows, so its gradient tells them."""

    def start(p, batch, par):
        return {"x": batch["x"] * p, "seen": ()}

    def drop(p, s, par):
        y = fp.nn.dropout(s["x"], rate, par, "x")
        return {"x": s["x"], "seen": (*s["seen"], y)}

    def loss(p, s, par):
        places = torch.arange(1, 7, dtype=s["x"].dtype).view(1, 3, 2)
        a, b = s["seen"]
        return ((a + 100 * b) * places * par.batch["weight"].view(-1, 1, 1)).sum(), torch.tensor(len(par.batch["x"]))

    fields = {"x": fp.Input((None, 3, 2), torch.float64), "weight": fp.Input((None,), torch.float64)}
    layers = [("start", "scale", start), ("first", [], drop), ("second", [], drop)]
    count = lambda batch: torch.tensor(len(batch["x"]))  # noqa: E731
    return fp.Model({"scale": fp.Param((3, 2), "seq embed", fp.init.ones())}, layers, loss, fields, count)


def probe_batch():
    return {
        "x": torch.ones(4, 3, 2, dtype=torch.float64),
        "weight": 10.0 ** (3 * torch.arange(4.0, dtype=torch.float64)),
    }


def test_a_step_draws_new_masks_and_the_same_state_the_same_ones():
    def main(world):
        step = fp.compose(fp.stage_pp(microbatches=2))(probe()).step(world, fp.optim.sgd(0.0), dtype=torch.float64)
        state = step.init(SEED)
        first, once = step(state, probe_batch())
        _, again = step(state, probe_batch())
        _, second = step(first, probe_batch())
        _, other_seed = step(step.init(SEED + 1), probe_batch())
        return [metrics["loss"] for metrics in (once, again, second, other_seed)]

    once, again, second, other_seed = fp.run(main, fp.Mesh())[0]
    assert once == again
    assert len({once, second, other_seed}) == 3
    batch, params = probe_batch(), {"scale": torch.ones(3, 2, dtype=torch.float64)}
    for step, found in enumerate((once, second)):
        assert probe()(params, batch, RunPar(batch=batch, key=step_key(SEED, step))).item() == pytest.approx(
            found, 1e-14
        )


def test_layers_that_share_a_function_draw_different_masks():
    seen = []

    def drop(p, x, par):
        seen.append(fp.nn.dropout(x["x"], 0.5, par, "x") != 0)
        return x

    loss = lambda p, x, par: (x["x"].sum(), 1)  # noqa: E731
    fields = {"x": fp.Input((None, 30, 20), torch.float32)}
    model = fp.Model({}, [("first", [], drop), ("second", [], drop)], loss, fields)
    model({}, {"x": torch.ones(2, 30, 20)})
    assert 0.45 < (seen[0] == seen[1]).double().mean() < 0.55


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_dropout_changes_no_parameter_and_the_same_model_without_it_evaluates(name):
    with_it, without = model_of(name), model_of(name, 0.0)
    params, batch = with_it.init(SEED, torch.float64), batches()[0]
    assert with_it.leaves.keys() == without.leaves.keys()
    keys = [step_key(SEED, step) for step in range(2)]
    trained, evaluated = ([m(params, batch, RunPar(batch=batch, key=k)) for k in keys] for m in (with_it, without))
    assert trained[0] != trained[1]
    assert evaluated[0] == evaluated[1] == without(params, batch)


def test_the_reference_is_the_first_step_from_seed_zero_unless_told():
    model, batch = model_of("gpt"), batches()[0]
    params = model.init(0, torch.float64)
    assert model(params, batch) == model(params, batch, RunPar(batch=batch, key=step_key(0, 0)))


@pytest.mark.parametrize("rate", [-0.1, 1, True, "0.1"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_model_refuses_a_rate_that_is_no_probability_below_one(name, rate):
    with pytest.raises(ModelError, match=rf"{name}\(dropout={rate!r}\): a probability in \[0, 1\)"):
        model_of(name, rate)


def test_layers_that_share_a_function_with_dropout_are_traced_once():
    calls = []

    def drop(p, x, par):
        calls.append(1)
        return {"x": fp.nn.dropout(x["x"], 0.5, par, "x")}

    loss = {"w": "w"}, lambda p, x, par: ((x["x"] * p["w"]).sum(), x["x"].shape[0])
    fields = {"x": fp.Input((None, 30, 20), torch.float32)}
    count = lambda batch: torch.tensor(len(batch["x"]))  # noqa: E731
    layers = [(f"layer{i}", [], drop) for i in range(9)]
    traced = []
    for n in (2, 9):
        fp.compose(fp.dp_reduce())(fp.Model({"w": fp.Param((20,), "embed")}, layers[:n], loss, fields, count)).plan(
            fp.Mesh(dp=2)
        )
        traced.append(len(calls))
        calls.clear()
    assert traced[0] == traced[1]


def test_dropout_leaves_what_is_owed_as_it_was():
    mesh = fp.Mesh(dp=2, pp=2, tp=2)
    for mode in ("ALL_REDUCE", "REDUCE_SCATTER"):
        plans = [
            fp.compose(fp.shard_tp(mode), fp.stage_pp(), fp.dp_reduce())(model_of("gpt", rate)).plan(mesh)
            for rate in (0.0, RATE)
        ]
        owed = [{path: [debt.axis for debt in spec.owes] for path, spec in plan.specs.items()} for plan in plans]
        assert owed[0] == owed[1]


def test_rows_differ_along_the_data_axes_so_that_a_parameter_that_meets_them_owes():
    def layer(p, batch, par):
        return p * par.rows.view(-1, 1).double()

    loss = lambda p, x, par: (x.sum(), torch.tensor(x.shape[0]))  # noqa: E731
    count = lambda batch: torch.tensor(len(batch["x"]))  # noqa: E731
    model = fp.Model(
        {"w": fp.Param((3,), "embed", fp.init.ones())},
        [("rows", "w", layer)],
        loss,
        {"x": fp.Input((None, 1), torch.float64)},
        count,
    )
    program, mesh = fp.compose(fp.dp_reduce(), fp.stage_pp(microbatches=2))(model), fp.Mesh(dp=2)
    assert [debt.axis for debt in program.plan(mesh).specs["w"].owes] == ["ep", "dp"]
    run = oracle.train_on(program, mesh, [{"x": torch.ones(8, 1, dtype=torch.float64)}], fp.optim.sgd(1.0)).run
    assert run.losses == [3 * sum(range(8)) / 8]
    assert torch.equal(run.weights["w"], torch.full((3,), 1 - sum(range(8)) / 8, dtype=torch.float64))
