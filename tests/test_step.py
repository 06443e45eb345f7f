"""The step: pure, equal to one process, the same numbers everywhere, and careful with what it is given."""

from __future__ import annotations

import functools
import math
import re
from typing import NamedTuple

import pytest
import torch

import functional_par as fp
from functional_par import (
    CompositionError,
    DataError,
    Input,
    Mesh,
    Model,
    ModelError,
    NonFiniteError,
    ParallelError,
    Param,
    StateError,
    init,
    tree,
)

from . import oracle
from .oracle import adamw, close, equal_runs, same_bits, token_batch, train, train_on, untie
from .toys import VOCAB, odd, regression, small_gpt, small_llama

SEQ = 4
CUBE = Mesh(dp=2, pp=2, tp=2)


def cube(model=None, tied=True, mode="REDUCE_SCATTER", **options):
    """All four transforms, as mean as can be."""
    options = {"microbatches": 3, **options}
    ties = [fp.tie("head.weight", "embed.weight")] if tied else []
    return fp.compose(*ties, fp.shard_tp(mode, async_comm=True), fp.stage_pp(**options), fp.dp_reduce())(model or GPT)


GPT = small_gpt(13, blocks=2, seq=SEQ)


@functools.cache
def cubed():
    return cube()


@functools.cache
def batches(n=3, rows=12, vocab=13):
    return [token_batch(vocab, rows, SEQ, seed) for seed in range(n)]


def snapshot(state, batch):
    """Copies of everything that a step is given."""
    slots = {(slot, path): x.clone() for slot, leaves in state.flat_opt.items() for path, x in leaves.items()}
    return {path: x.clone() for path, x in state.flat.items()}, slots, {name: x.clone() for name, x in batch.items()}


def same_snapshots(a, b):
    for left, right in zip(a, b, strict=True):
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), key


@pytest.mark.parametrize("mesh", [Mesh(), CUBE], ids=str)
@pytest.mark.parametrize("engine", ["func", "tape"])
def test_a_step_leaves_its_arguments_alone_and_twice_gives_the_same_bits(mesh, engine):
    batch = batches()[0]

    def main(world):
        step = cubed().step(world, adamw(), clip=0.3, dtype=torch.float64, engine=engine)
        state, _ = step(step.init(0), batch)
        before = snapshot(state, batch)
        (one, first), (two, second) = step(state, batch), step(state, batch)
        same_snapshots(snapshot(state, batch), before)
        same_snapshots(snapshot(one, batch), snapshot(two, batch))
        assert first == second
        assert (state.step, one.step, two.step) == (1, 2, 2)
        assert not any(torch.equal(one.flat[path], x) for path, x in state.flat.items())

    fp.run(main, mesh)


@pytest.mark.parametrize("mesh", [Mesh(), CUBE], ids=str)
@pytest.mark.parametrize("make", [adamw, lambda: fp.optim.sgd(0.1, momentum=0.9)], ids=["adamw", "sgd"])
def test_donating_gives_the_bits_of_the_pure_step_consumes_the_state_and_reuses_its_memory(mesh, make):
    pure = train_on(cubed(), mesh, batches(), make(), clip=0.3)

    def main(world):
        step = cubed().step(world, make(), clip=0.3, dtype=torch.float64, donate=True)
        state = step.init(0)
        addresses = {path: x.data_ptr() for path, x in state.flat.items()}
        for batch in batches():
            old, (state, _) = state, step(state, batch)
            consumed = rf"the state of step {old.step} was consumed by a step with donate=True"
            for name in ("params", "opt"):
                with pytest.raises(StateError, match=consumed):
                    getattr(old, name)
            with pytest.raises(StateError, match=consumed):
                step(old, batch)
        assert {path: x.data_ptr() for path, x in state.flat.items()} == addresses
        return state

    for donated, kept in zip(fp.run(main, mesh), pure.states, strict=True):
        same_snapshots(snapshot(donated, {}), snapshot(kept, {}))


def test_the_same_program_gives_the_same_bits_run_after_run():
    same_bits(*(train_on(cubed(), CUBE, batches(2), clip=0.3).run for _ in range(2)))


CASES = {
    "gpt": lambda: (cubed(), batches()),
    "llama": lambda: (cube(small_llama(13, seq=SEQ), tied=False, mode="ALL_REDUCE"), batches()),
    "odd": lambda: (cube(odd(), tied=False), batches(vocab=VOCAB)),
}


@pytest.mark.parametrize("name", CASES)
def test_both_engines_give_the_same_bits(name):
    program, data = CASES[name]()
    same_bits(*(train_on(program, CUBE, data[:1], clip=0.3, engine=engine).run for engine in ("func", "tape")))


@functools.cache
def clipped(norm, clip):
    return train(cubed().model, batches(2), clip=clip, norm=norm)


@pytest.mark.parametrize("mesh", [Mesh(pp=2, tp=2), CUBE], ids=str)
@pytest.mark.parametrize(("norm", "clip"), [(1.0, 2.0), (2.0, 0.3), (math.inf, 0.05)], ids=["1", "2", "inf"])
def test_norms_of_every_order_and_their_clipping_equal_one_process_with_ties_once_and_padding_never(mesh, norm, clip):
    expected = clipped(norm, clip)
    assert min(expected.norms) > clip
    run = train_on(cubed(), mesh, batches(2), clip=clip, norm=norm).run
    run.weights = {path: run.weights[path] for path in expected.weights}
    equal_runs(run, expected)


@pytest.mark.parametrize("split", [[1, 1, 3], [2, 2, 1], [1, 3, 1]], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(pp=3), Mesh(pp=3, dp=2, tp=2)], ids=str)
def test_a_model_with_skips_integers_booleans_and_an_empty_stage_equals_one_process(mesh, split):
    program = fp.compose(fp.shard_tp(), fp.stage_pp(microbatches=2, split=split), fp.dp_reduce())(ODD)
    equal_runs(train_on(program, mesh, batches(vocab=VOCAB), clip=1.0).run, odd_reference())


ODD = odd()


@functools.cache
def odd_reference():
    return train(ODD, batches(vocab=VOCAB), clip=1.0)


def test_one_layer_a_stage_too():
    program = fp.compose(fp.stage_pp("afab", microbatches=4))(ODD)
    equal_runs(train_on(program, Mesh(pp=5), batches(vocab=VOCAB), clip=1.0).run, odd_reference())


def test_frozen_leaves_stay_have_no_slots_and_the_others_move_as_in_one_process():
    model = odd(trainable_scale=False)
    program = fp.compose(fp.shard_tp(), fp.stage_pp(microbatches=2, split=[1, 3, 1]), fp.dp_reduce())(model)
    ranks = train_on(program, Mesh(pp=3, dp=2), batches(vocab=VOCAB))
    equal_runs(ranks.run, train(model, batches(vocab=VOCAB)))
    assert torch.equal(ranks.run.weights["scale"], model.init(0, torch.float64)["scale"])
    for state in ranks.states:
        assert all("scale" not in leaves for leaves in state.flat_opt.values())
    assert any("scale" in state.flat for state in ranks.states)


@pytest.mark.parametrize(
    ("mesh", "microbatches"), [(Mesh(), 1), (Mesh(), 12), (Mesh(dp=4), 3), (Mesh(ep=2, dp=3), 1), (Mesh(dp=2, pp=3), 6)]
)
def test_the_loss_weighs_tokens_and_not_replicas_or_microbatches(mesh, microbatches):
    batch = token_batch(13, 12, SEQ)
    batch["labels"][:6] = -100
    batch["labels"][6, 1:] = -100
    program = fp.compose(fp.stage_pp(microbatches=microbatches), fp.dp_reduce())(GPT)
    equal_runs(train_on(program, mesh, [batch]).run, train(GPT, [batch]))


def test_a_batch_without_a_label_has_loss_zero_and_moves_nothing():
    batch = token_batch(13, 12, SEQ)
    batch["labels"].fill_(-100)
    ranks = train_on(cubed(), CUBE, [batch], fp.optim.sgd(1.0), clip=1.0)
    assert (ranks.run.losses, ranks.run.norms, ranks.run.tokens) == ([0.0], [0.0], [0])
    for path, x in untie(tree.flatten(cubed().model.init(0, torch.float64)), cubed().plan(CUBE)).items():
        assert torch.equal(ranks.run.weights[path], x)


@pytest.mark.parametrize(("mode", "schedule"), [("ALL_REDUCE", "afab"), ("REDUCE_SCATTER", "1f1b")])
def test_the_gradient_of_a_tied_leaf_is_that_of_one_process_and_its_copies_stay_equal_in_every_bit(mode, schedule):
    program = cube(GPT, mode=mode, schedule=schedule)
    params = tree.flatten(program.model.init(0, torch.float64))
    _, grads = oracle.gradients(program.model, params, batches()[0])
    ranks = train_on(program, CUBE, batches(2), fp.optim.sgd(1.0))
    first = fp.unshard([tree.unflatten(trail[0]) for trail in ranks.trail], program.plan(CUBE))
    for path, weight in tree.flatten(first).items():
        canonical = "embed.weight" if path == "head.weight" else path
        close(params[canonical] - weight, grads[canonical], path)
    equal_copies(program.plan(CUBE), ranks)


def equal_copies(plan, ranks):
    """Every copy of every shard has the same bits after every step, tied and replicated leaves alike."""
    tied = set()
    for step in range(len(ranks.trail[0])):
        seen = {}
        for rank, coords in enumerate(plan.mesh):
            for path, x in ranks.trail[rank][step].items():
                first, owner = seen.setdefault((path, plan.specs[path].starts(plan.mesh, coords)), (x, coords))
                assert torch.equal(x, first), (path, rank, step)
                tied |= {path} if owner.pp != coords.pp else set()
    return tied


@pytest.mark.parametrize("make", [small_gpt, small_llama])
def test_norms_in_reduce_scatter_and_tied_leaves_stay_equal_over_tp_dp_and_stages_in_every_bit(make):
    program = fp.compose(
        fp.tie("head.weight", "embed.weight"),
        fp.shard_tp("REDUCE_SCATTER"),
        fp.stage_pp(microbatches=2),
        fp.dp_reduce(),
    )(make(13, seq=SEQ))
    ranks = train_on(program, CUBE, batches(2), dtype=torch.float32, clip=0.3)
    assert equal_copies(program.plan(CUBE), ranks) == {"embed.weight"}
    assert not torch.equal(ranks.trail[0][0]["embed.weight"], ranks.trail[0][1]["embed.weight"])


def test_low_precision_weights_are_trained_with_float32_gradients_and_moments():
    ranks = train_on(cubed(), CUBE, batches(), dtype=torch.bfloat16, clip=0.3)
    assert all(x.dtype == torch.bfloat16 for state in ranks.states for x in state.flat.values())
    assert all(
        x.dtype == torch.float32 for s in ranks.states for leaves in s.flat_opt.values() for x in leaves.values()
    )
    expected = train(cubed().model, batches(), clip=0.3)
    assert ranks.run.losses == pytest.approx(expected.losses, rel=2e-2)
    equal_copies(cubed().plan(CUBE), ranks)


def test_float32_equals_one_process_to_its_precision():
    run = train_on(cubed(), CUBE, batches(), dtype=torch.float32, clip=0.3).run
    expected = train(cubed().model, batches(), clip=0.3)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)


def test_the_learning_rate_is_that_of_the_step_number():
    seen = []

    def main(world):
        step = fp.compose()(regression()).step(world, fp.optim.sgd(lambda step: 0.1 / (step + 1)), dtype=torch.float64)
        state = step.init(0)
        for _ in range(3):
            state, metrics = step(state, rows(4))
            seen.append(metrics["lr"])
        assert state.step == 3

    fp.run(main, Mesh())
    assert seen == [0.1, 0.1 / 2, 0.1 / 3]


def rows(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n, 3, generator=generator, dtype=torch.float64),
        "y": torch.randn(n, generator=generator, dtype=torch.float64),
    }


def test_without_labels_every_row_is_a_term_and_the_batch_may_change_its_size():
    program = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(regression())
    data = [rows(n, seed=n) for n in (4, 16, 8)]
    expected = train(program.model, data, clip=1.0)
    assert expected.tokens == [4, 16, 8]
    for mesh in (Mesh(dp=2), Mesh(pp=2), Mesh(dp=2, pp=2)):
        equal_runs(train_on(program, mesh, data, clip=1.0).run, expected)


def test_a_batch_with_rows_is_read_by_each_replica_once_and_trains_alike():
    class Rows:
        def __init__(self, whole):
            self.whole, self.size, self.read = whole, len(whole["y"]), []

        def rows(self, start, stop):
            self.read.append((start, stop))
            return {name: x[start:stop] for name, x in self.whole.items()}

    program = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(regression())
    lazy = Rows(rows(8))
    same_bits(train_on(program, Mesh(dp=2, pp=2), [lazy]).run, train_on(program, Mesh(dp=2, pp=2), [rows(8)]).run)
    assert sorted(lazy.read) == [(0, 4), (0, 4), (4, 8), (4, 8)]


def rejected(error, message, batch, mesh=CUBE, program=None, make=adamw, donate=False, **options):
    """A step that must raise on every rank, with the state still good; returns nothing."""

    def main(world):
        step = (program or cubed()).step(world, make(), dtype=torch.float64, donate=donate, **options)
        state = step.init(0)
        before = snapshot(state, {})
        with pytest.raises(error, match=message):
            step(state, batch)
        same_snapshots(snapshot(state, {}), before)
        assert state.step == 0
        return world.record.worked

    return fp.run(main, mesh, timeout=30.0)


def test_a_wrong_batch_is_refused_on_every_rank_before_any_communication():
    wrong = token_batch(13, 11, SEQ)
    assert not any(rejected(DataError, "a batch of 11 rows does not divide into ep=1 \\* dp=2 replicas times 3", wrong))
    assert not any(rejected(DataError, "the model takes the fields", {"tokens": wrong["tokens"][:6]}))


def poisoned(where):
    """A regression whose loss, or whose gradient alone, is not a number on the last row."""

    def first(p, batch, par):
        x = (batch["x"] * p).sum(-1)
        if where == "loss":
            return x + torch.where(batch["x"][:, 0] > 100, math.inf, 0.0)
        # The gradient of the root at zero is infinite, times zero.
        return x + 0.0 * torch.sqrt((x * 0.0).abs()) * (batch["x"][:, 0] > 100)

    layers = [("first", "w", first), ("second", "v", lambda p, x, par: x * p)]
    params = {"w": Param((3,), "in", init.ones()), "v": Param((1,), "one", init.ones())}
    return Model(
        params, layers, lambda p, x, par: (x.sum(), torch.tensor(len(x))), {"x": Input((None, 3), torch.float64)}
    )


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("where", ["loss", "grad_norm"])
def test_a_number_that_is_not_finite_is_refused_on_every_rank_and_leaves_the_state_alone(where, donate, norm):
    program = fp.compose(fp.dp_reduce(), fp.stage_pp(microbatches=2))(poisoned(where))
    x = torch.ones(8, 3, dtype=torch.float64)
    x[-1] = 1000.0
    message = (
        rf"step 1: {where} is (inf|nan)\. The state is unchanged\. Lower the learning rate, clip gradients, or look"
    )
    rejected(NonFiniteError, message, {"x": x}, Mesh(dp=2, pp=2), program, donate=donate, norm=norm)


def test_a_wrong_count_is_refused_with_the_fix():
    model = Model(
        {"w": Param((3,), "in")},
        [("x", "w", lambda p, batch, par: batch["x"] @ p)],
        lambda p, x, par: (x.sum(), torch.tensor(2 * len(x))),
        {"x": Input((None, 3), torch.float64)},
    )
    program = fp.compose(fp.dp_reduce())(model)
    message = r"the loss returned a count of 8 over the whole batch, but 4 terms were counted beforehand.*count="
    rejected(ModelError, message, {"x": rows(4)["x"]}, Mesh(dp=2), program)
    right = fp.compose(fp.dp_reduce())(
        Model(model.params, model.layers, model.loss, model.batch, lambda b: 2 * len(b["x"]))
    )
    equal_runs(train_on(right, Mesh(dp=2), [{"x": rows(4)["x"]}]).run, train(right.model, [{"x": rows(4)["x"]}]))


def test_the_count_of_the_loss_may_be_a_plain_number():
    model = Model(
        {"w": Param((3,), "in")},
        [("x", "w", lambda p, batch, par: batch["x"] @ p)],
        lambda p, x, par: (x.square().sum(), len(x)),
        {"x": Input((None, 3), torch.float64)},
    )
    program, data = fp.compose(fp.dp_reduce(), fp.stage_pp(microbatches=2))(model), [{"x": rows(8)["x"]}]
    for engine in ("func", "tape"):
        equal_runs(train_on(program, Mesh(dp=2), data, engine=engine).run, train(model, data))


def test_an_id_outside_the_vocabulary_stops_every_rank_with_its_error():
    batch = token_batch(13, 12, SEQ)
    batch["tokens"][7, 2] = 13

    def main(world):
        step = cubed().step(world, adamw())
        step(step.init(0), batch)

    with pytest.raises(DataError, match=r"token id 13 at .* is outside the vocabulary: vocab=13"):
        fp.run(main, CUBE, timeout=30.0)


def test_the_state_of_another_program_is_refused_with_the_leaves():
    def main(world):
        step = fp.compose()(regression()).step(world, adamw())
        other = fp.compose()(odd()).step(world, adamw()).init(0)
        with pytest.raises(
            StateError, match=r"this state belongs to another program or stage; it differs in the leaves first\.b"
        ):
            step(other, rows(4))
        with pytest.raises(
            StateError, match=re.escape("step(dict, ...): expected the state from step.init or from the step")
        ):
            step({}, rows(4))

    fp.run(main, Mesh())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"norm": 3.0}, CompositionError, "norm=3.0: the order of the gradient norm is 1, 2 or inf."),
        ({"clip": 0.0}, CompositionError, "clip=0.0: the largest gradient norm is a positive number"),
        ({"dtype": torch.int64}, CompositionError, "step(dtype=torch.int64): parameters have a floating-point dtype"),
        ({"dtype": "float32"}, CompositionError, "step(dtype='float32'): parameters have a floating-point dtype"),
        ({"engine": "jax"}, ParallelError, "engine 'jax': it is one of func, tape, compile."),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_when_the_step_is_made(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fp.run(lambda world: cubed().step(world, adamw(), **options), CUBE)


def test_initial_values_do_not_depend_on_the_layout_and_follow_the_seed():
    def initial(mesh, seed):
        states = fp.run(lambda world: cubed().step(world, adamw()).init(seed).params, mesh)
        return tree.flatten(fp.unshard(states, cubed().plan(mesh)))

    one = initial(Mesh(), 5)
    for mesh in (CUBE, Mesh(tp=4), Mesh(ep=2, pp=4)):
        for path, x in initial(mesh, 5).items():
            assert torch.equal(x, one[path])
    assert not torch.equal(initial(Mesh(), 6)["embed.weight"], one["embed.weight"])


def test_ties_of_norms_and_of_whole_key_heads_over_stages_sum_over_tp_too():
    """What nanotron skips: a leaf that is tied over stages and partial over tp needs both sums."""
    model = small_llama(13, blocks=2, seq=SEQ, kv_heads=2)
    ties = [fp.tie(f"blocks.0.{name}.weight", f"blocks.1.{name}.weight") for name in ("norm1", "attn.k", "attn.out")]
    program = fp.compose(
        *ties, fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(microbatches=3, split=[2, 2]), fp.dp_reduce()
    )(model)
    mesh = Mesh(pp=2, tp=4)
    owed = {
        path: [debt.axis for debt in spec.owes if mesh.sizes[debt.axis] > 1]
        for path, spec in program.plan(mesh).specs.items()
    }
    assert owed["blocks.0.norm1.weight"] == owed["blocks.0.attn.k.weight"] == ["pp", "tp"]
    assert owed["blocks.0.attn.out.weight"] == ["pp"]
    expected = train(program.model, batches(), clip=0.3)
    for each in (mesh, Mesh(pp=2, tp=2, dp=2)):
        ranks = train_on(program, each, batches(), clip=0.3)
        expected_run = oracle.Run(
            expected.losses, expected.norms, expected.tokens, untie(expected.weights, program.plan(each))
        )
        equal_runs(ranks.run, expected_run)
        assert {"blocks.0.norm1.weight", "blocks.0.attn.k.weight"} <= equal_copies(program.plan(each), ranks)


def test_a_layer_may_read_both_ends_of_a_tie_and_one_leaf_under_two_names():
    def first(p, batch, par):
        return (batch["x"] @ p["a"].T) * p["b"][:, 0] + batch["x"] @ p["again"].T

    def second(p, x, par):
        return x.sum(-1) * p["c"]

    square = Param((3, 3), "in out", init.normal(0.5))
    model = Model(
        {"a": square, "b": square, "c": Param((1,), "one", init.ones())},
        [("first", {"a": "a", "b": "b", "again": "a"}, first), ("second", ["c"], second)],
        lambda p, x, par: ((x - par.batch["y"]).square().sum(), len(x)),
        regression().batch,
    )
    program = fp.compose(fp.tie("b", "a"), fp.stage_pp(microbatches=2), fp.dp_reduce())(model)
    assert list(program.model.leaves) == ["a", "c"]
    data = [rows(8, seed) for seed in range(2)]
    expected = train(program.model, data)
    run = train_on(program, Mesh(dp=2, pp=2), data).run
    assert torch.equal(run.weights["a"], run.weights["b"])
    del run.weights["b"]
    equal_runs(run, expected)


@pytest.mark.parametrize("engine", ["func", "tape"])
@pytest.mark.parametrize("frozen", [{"first"}, {"second"}, {"first", "second"}])
def test_a_stage_may_be_frozen_altogether(frozen, engine):
    base = regression()
    params = {
        name: tree.map_leaves(lambda _, p: Param(p.shape, p.dims, p.init, False), {"x": base.params[name]})["x"]
        if name in frozen
        else base.params[name]
        for name in base.params
    }

    def loss(p, x, par):
        return (x * p - par.batch["y"]).square().sum(), len(x)

    params["out"] = Param((1,), "one", init.ones())
    model = Model(params, base.layers, ("out", loss), base.batch)
    program, data = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(model), [rows(8, seed) for seed in range(2)]
    expected = train(model, data, clip=0.5)
    for mesh in (Mesh(), Mesh(pp=2), Mesh(dp=2, pp=2)):
        equal_runs(train_on(program, mesh, data, clip=0.5, engine=engine).run, expected)


@pytest.mark.parametrize("engine", ["func", "tape"])
def test_a_layer_behind_which_no_gradient_flows_trains_with_zeros(engine):
    base = regression()

    def first(p, batch, par):
        return torch.tanh(batch["x"] @ p["w"].T + p["b"]).detach()

    model = Model(base.params, [("first", "first", first), base.layers[1]], base.loss, base.batch)
    program, data = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(model), [rows(8, seed) for seed in range(2)]
    for mesh in (Mesh(), Mesh(dp=2, pp=2)):
        equal_runs(train_on(program, mesh, data, engine=engine).run, train(model, data))


@pytest.mark.parametrize("kind", ["tuple", "list", "nested", "named"])
def test_the_stream_may_be_any_pytree(kind):
    class Pair(NamedTuple):
        x: object
        rest: object

    wrap = {
        "tuple": lambda x, y: (x, y),
        "list": lambda x, y: [x, y],
        "nested": lambda x, y: (x, {"y": [y]}),
        "named": lambda x, y: Pair(x, y),
    }[kind]
    unwrap = (lambda s: (s[0], s[1]["y"][0])) if kind == "nested" else (lambda s: (s[0], s[1]))

    def first(p, batch, par):
        return wrap(torch.tanh(batch["x"] @ p["w"].T + p["b"]), batch["y"] > 0)

    def second(p, s, par):
        x, sign = unwrap(s)
        return wrap(torch.where(sign, x @ p, 0.0), sign)

    def loss(p, s, par):
        x, sign = unwrap(s)
        return ((x - par.batch["y"]) * (1 + sign)).square().sum(), len(x)

    base = regression()
    model = Model(base.params, [("first", "first", first), ("second", "second", second)], loss, base.batch)
    program, data = fp.compose(fp.stage_pp(microbatches=2), fp.dp_reduce())(model), [rows(8, seed) for seed in range(2)]
    equal_runs(train_on(program, Mesh(dp=2, pp=2), data).run, train(model, data))
