"""Maps of the user's own on gradients and updates: the same in every layout, and held to what gradients owe."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import pytest
import torch

import functional_par as fp
from functional_par import CompositionError, MissingCollective, tree
from tests import oracle
from tests.toys import odd, small_gpt, small_llama
from tests.transforms.wrong_maps import SIZED, WRONG

MESH = fp.Mesh(pp=2, dp=2, tp=2)
RANKS = (fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(microbatches=2), fp.dp_reduce())
TIE = fp.tie("head.weight", "embed.weight")
BATCHES = [oracle.token_batch(13, 12, 4, seed) for seed in range(3)]


@functools.cache
def examples():
    path = Path(__file__).parents[2] / "examples" / "own_transforms.py"
    spec = importlib.util.spec_from_file_location("own_transforms", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scaled(grad, leaf):
    return grad * 0.25


def by_entry(grad, leaf):
    return grad.clamp(-0.01, 0.01)


def trust_ratio(update, leaf):
    """LARS: the length of an update is a fixed part of the length of its leaf."""
    return update * (0.1 * leaf.norm(leaf.param) / leaf.norm(update))


def decayed(grad, leaf):
    return grad + 0.1 * leaf.param


def noisy(grad, leaf):
    return grad + 0.01 * leaf.normal()


def sign_of_the_sum(grad, leaf):
    return leaf.psum(grad, *leaf.owes).sign() * 0.01


def of_largest(grad, leaf):
    return grad / leaf.amax(grad.abs())


OWN = {
    "local, linear": [fp.on_local_gradients(scaled)],
    "local, summed by itself": [fp.on_local_gradients(sign_of_the_sum, "blocks.0.*", "norm.*")],
    "local twice": [
        fp.on_local_gradients(scaled, name="first"),
        fp.on_local_gradients(sign_of_the_sum, "*.weight", name="second"),
    ],
    "low rank": [examples().low_rank("blocks.*.mlp.*.weight", rank=3)],
    "reduced": [fp.on_reduced_gradients(by_entry), fp.on_reduced_gradients(decayed, "blocks.*")],
    "reduced, largest entry": [fp.on_reduced_gradients(of_largest)],
    "clip each leaf": [examples().clip_each_leaf(0.02)],
    "noise": [fp.on_reduced_gradients(noisy)],
    "updates": [fp.on_updates(trust_ratio, "*.weight")],
    "all": [
        fp.on_updates(scaled),
        fp.on_local_gradients(scaled, name="a"),
        fp.on_reduced_gradients(by_entry, name="b"),
    ],
}


@pytest.mark.parametrize("name", OWN)
def test_a_map_does_the_same_in_every_layout(name):
    make = (
        small_llama  # no biases: a key's has a gradient of zero, of which some of these maps make rounding errors large
    )
    one = oracle.train_on(fp.compose(*OWN[name], TIE)(make()), fp.Mesh(), BATCHES, clip=0.5).run
    program = fp.compose(*OWN[name], TIE, *RANKS)(make())
    many = oracle.train_on(program, MESH, BATCHES, clip=0.5)
    oracle.equal_runs(many.run, one)
    plain = oracle.train_on(fp.compose(TIE)(make()), fp.Mesh(), BATCHES, clip=0.5).run
    assert any(not torch.equal(one.weights[path], x) for path, x in plain.weights.items()), "the map did something"
    for state, rank in zip(many.states, range(8), strict=True):
        coords = MESH.coords(rank)
        twin = many.states[MESH.rank(**(coords._asdict() | {"dp": 1 - coords.dp}))]
        assert all(torch.equal(x, twin.flat[path]) for path, x in state.flat.items()), "replicas drifted apart"


def test_a_low_rank_reduction_of_full_rank_is_the_sum_itself():
    own = examples().low_rank("blocks.*.mlp.*.weight", rank=8)
    program = fp.compose(own, *RANKS)(small_gpt())
    expected = oracle.train(small_gpt(), BATCHES[:1], sgd=0.1)
    found = oracle.train_on(program, MESH, BATCHES[:1], fp.optim.sgd(lr=0.1)).run
    for path, x in expected.weights.items():
        assert (found.weights[path] - x).abs().max() < 1e-8, path  # a Cholesky of a Gram matrix squares the condition


def test_what_a_map_sums_the_step_does_not_sum_again_and_fewer_bytes_travel():
    own = examples().in_bfloat16("blocks.*")
    model = small_gpt()

    def sent(*transforms):
        program = fp.compose(*transforms, fp.dp_reduce())(model)
        record = oracle.train_on(program, fp.Mesh(dp=2), BATCHES[:1], dtype=torch.float32).records[0]
        return {label: n for (phase, label, _), n in record.nbytes.items() if phase == "gradients"}

    inside = sum(x.numel() for path, x in tree.flatten(model.init(0)).items() if path.startswith("blocks"))
    assert sent(own) == {
        "dp": sent(fp.on_local_gradients(scaled, "norm.*"))["dp"] - 4 * padded(model),
        "ep+dp": 2 * inside,
    }


def padded(model):
    """Elements of the leaves of blocks in the flat buffer of a bucket."""
    sizes = [x.numel() for path, x in tree.flatten(model.init(0)).items() if path.startswith("blocks")]
    return sum(-(-n // 16) * 16 for n in sizes)


def test_maps_run_in_their_phase_whatever_the_order_of_the_transforms_and_in_the_given_order_within_it():
    seen = []

    def note(name):
        def function(x, leaf):
            if x.device.type != "meta":
                seen.append((name, leaf.owes, leaf.step))
            return x

        return function

    own = [
        fp.on_updates(note("update"), "norm.weight", name="u"),
        fp.on_reduced_gradients(note("reduced"), "norm.weight", name="r"),
        fp.on_local_gradients(note("local 1"), "norm.weight", name="1"),
        fp.on_local_gradients(note("local 2"), "norm.weight", name="2"),
    ]
    oracle.train_on(fp.compose(*own, fp.dp_reduce())(small_gpt()), fp.Mesh(), BATCHES[:1])
    both = ("ep", "dp")
    assert seen == [("local 1", both, 0), ("local 2", both, 0), ("reduced", (), 0), ("update", (), 0)]


def test_later_maps_are_told_what_earlier_ones_have_paid():
    owed = {}

    def note(grad, leaf):
        if grad.device.type != "meta":
            owed[leaf.path] = leaf.owes
        return grad

    own = [fp.on_local_gradients(sign_of_the_sum, "embed.*"), fp.on_local_gradients(note)]
    oracle.train_on(fp.compose(*own, TIE, *RANKS)(small_gpt()), MESH, BATCHES[:1])
    assert owed["embed.weight"] == ()
    assert owed["norm.weight"] == ("ep", "dp", "tp")


def test_the_norm_and_the_clip_see_what_maps_on_reduced_gradients_return():
    program = fp.compose(fp.on_reduced_gradients(scaled))(small_gpt())
    plain = oracle.train(small_gpt(), BATCHES[:1])
    found = oracle.train_on(program, fp.Mesh(), BATCHES[:1]).run
    assert found.norms[0] == pytest.approx(0.25 * plain.norms[0], rel=1e-12)


def test_padding_stays_zero_whatever_a_map_writes_there():
    program = fp.compose(fp.on_reduced_gradients(lambda grad, leaf: grad + 1.0), fp.shard_tp())(small_gpt(vocab=13))
    found = oracle.train_on(program, fp.Mesh(tp=2), BATCHES[:2], fp.optim.sgd(lr=0.1))
    assert not found.states[1].flat["embed.weight"][6:].any()
    one = oracle.train_on(
        fp.compose(fp.on_reduced_gradients(lambda grad, leaf: grad + 1.0))(small_gpt(vocab=13)),
        fp.Mesh(),
        BATCHES[:2],
        fp.optim.sgd(lr=0.1),
    )
    oracle.equal_runs(found.run, one.run)


def test_a_step_with_maps_is_pure_and_donating_changes_no_bit():
    program = fp.compose(*OWN["all"])(small_gpt())
    kept = oracle.train_on(program, fp.Mesh(), BATCHES, donate=True).run
    oracle.same_bits(kept, oracle.train_on(program, fp.Mesh(), BATCHES).run)

    def main(world):
        step = program.step(world, oracle.adamw(), dtype=torch.float64)
        state = step.init(0)
        before = {path: x.clone() for path, x in state.flat.items()}
        first, second = step(state, BATCHES[0])[0], step(state, BATCHES[0])[0]
        assert all(torch.equal(x, before[path]) for path, x in state.flat.items())
        assert all(torch.equal(x, second.flat[path]) for path, x in first.flat.items())

    fp.run(main, fp.Mesh())


def test_explain_says_which_map_pays():
    program = fp.compose(examples().in_bfloat16("embed.*"), TIE, *RANKS)(small_gpt())
    text = str(program.explain(MESH))
    assert "own map           on_local_gradients(in_bfloat16), leaves: 1" in text
    (line,) = [line for line in text.splitlines() if line.startswith("embed.weight ")]
    assert line.endswith("on_local_gradients(in_bfloat16) pp+dp")
    assert re.search(r"^pp\+dp", text, re.MULTILINE) is None, "the step's own bucket of the tied leaf is gone"


def refused(function, on=fp.on_local_gradients, leaves="mlp.up", *more):
    program = fp.compose(on(function, leaves), *more, fp.shard_tp(), fp.dp_reduce())
    return lambda: program(odd())


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_map_is_refused_when_composed_with_the_leaf_the_line_and_the_reason(function):
    on, kind, message = WRONG[function]
    where = f"{on.__name__}({function.__name__}) on mlp.up, transforms/wrong_maps.py:"
    with pytest.raises(kind, match=re.escape(where) + ".*" + re.escape(message)):
        refused(function, on)()


def test_a_partial_sum_that_is_left_over_is_refused():
    def function(grad, leaf):
        return (grad * leaf.param).sum().expand(grad.shape)

    message = "it returns a partial sum over tp. Nobody adds up that sum over tp afterwards: leaf.psum(x, 'tp')."
    with pytest.raises(MissingCollective, match=re.escape(message)):
        refused(function, fp.on_reduced_gradients)()


def test_a_sum_that_is_not_linear_is_refused_over_stages_too():
    def normalised(grad, leaf):
        return grad / leaf.psum(grad.square().sum(), *leaf.spec.sharded).sqrt()

    program = fp.compose(fp.on_local_gradients(normalised, "embed.*"), TIE, fp.shard_tp(), fp.stage_pp())(small_gpt())
    with pytest.raises(MissingCollective, match=r"partial sum over pp\. It is not linear"):
        program.plan(fp.Mesh(pp=2, tp=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp.on_local_gradients(3), "on_local_gradients(3): it takes a function (grad, leaf) -> grad."),
        (lambda: fp.on_updates(scaled, 3), "on_updates(..., 3): leaves are named by patterns"),
        (
            lambda: fp.on_updates(scaled, "mpl.*"),
            "on_updates(scaled): no trainable leaf matches 'mpl.*'. Leaves: table, mlp.up",
        ),
    ],
)
def test_a_map_that_names_no_function_or_no_leaf_is_refused(make, message):
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(make())(odd())


def test_two_maps_of_one_name_are_refused_and_a_name_tells_them_apart():
    with pytest.raises(CompositionError, match=r"two maps of this program are called 'on_updates\(scaled\)'. Name one"):
        fp.compose(fp.on_updates(scaled), fp.on_updates(scaled))(odd())
    fp.compose(fp.on_updates(scaled), fp.on_updates(scaled, name="again"))(odd())


def test_the_names_of_tied_leaves_are_told_when_a_pattern_misses():
    with pytest.raises(
        CompositionError, match=re.escape("no trainable leaf matches 'head.*'") + ".*Tied names: head.weight"
    ):
        fp.compose(fp.on_updates(scaled, "head.*"), TIE)(small_gpt())


def test_frozen_leaves_are_left_alone():
    program = fp.compose(fp.on_updates(lambda update, leaf: update + 1.0))(odd(trainable_scale=False))
    batch = oracle.token_batch(11, 6, 5)
    before = tree.flatten(odd().init(0, torch.float64))
    after = oracle.train_on(program, fp.Mesh(), [batch]).run.weights
    assert torch.equal(after["scale"], before["scale"])
    assert not torch.equal(after["temperature"], before["temperature"])


def test_an_approximation_has_the_kind_of_what_it_stands_for():
    def signs(grad, leaf):
        return leaf.approximate(grad, lambda x: x.sign() * x.abs().mean())

    program = fp.compose(fp.on_local_gradients(signs), fp.dp_reduce())(odd())
    spec = program.plan(fp.Mesh(dp=2)).specs["mlp.up"]
    assert spec.pending == ("ep", "dp")
    batch = oracle.token_batch(11, 6, 5)
    found = oracle.train_on(program, fp.Mesh(dp=2), [batch], fp.optim.sgd(lr=1.0)).run.weights
    weights = tree.flatten(odd().init(0, torch.float64))
    count = odd().count_terms(batch)
    update = torch.zeros_like(weights["mlp.up"])
    for half in range(2):
        rows = {name: x[3 * half : 3 * half + 3] for name, x in batch.items()}
        _, grads = oracle.gradients(odd(), weights, rows)
        grad = grads["mlp.up"] * odd().count_terms(rows) / count
        update += grad.sign() * grad.abs().mean()
    oracle.close(found["mlp.up"], weights["mlp.up"] - update)


def whole_of(x, leaf):
    for dim, axis in enumerate(leaf.spec.axes):
        x = leaf.all_gather(x, axis, dim) if axis else x
    return x


def block_of(x, leaf):
    for dim, axis in enumerate(leaf.spec.axes):
        x = leaf.slice(x, axis, dim) if axis else x
    return x


def shifted_to_unit_length(grad, leaf):
    grad = grad + 1.0
    return grad / leaf.norm(grad)


def from_the_smallest(grad, leaf):
    return grad * (1.0 + leaf.amax(-grad.abs()))


def by_its_count(grad, leaf):
    return grad / leaf.psum(torch.ones_like(grad).sum(), *leaf.spec.sharded)


def by_the_whole(grad, leaf):
    return grad * whole_of(grad, leaf).std() * 10.0


def orthogonal(grad, leaf):
    whole = whole_of(grad, leaf)
    rows = whole.flatten(0, -2) if whole.ndim > 1 else whole[None]
    square = torch.eye(rows.shape[0], dtype=grad.dtype) + rows @ rows.mT
    return block_of((torch.linalg.inv(square) @ rows).reshape(leaf.shape), leaf)


def noise_of_each_entry(grad, leaf):
    return grad + 0.1 * block_of(leaf.normal(*leaf.shape), leaf)


def towards_the_leaf(grad, leaf):
    return torch.lerp(grad, leaf.param, 0.1)


def rows_of_heads(grad, leaf):
    if grad.ndim != 3 or leaf.spec.axes[0] is None:
        return grad
    rows = grad.flatten(0, 1)
    return (rows * rows.norm(dim=1, keepdim=True)).unflatten(0, (-1, leaf.shape[1]))


WHOLE_LEAF = [
    shifted_to_unit_length,
    from_the_smallest,
    by_its_count,
    by_the_whole,
    orthogonal,
    noise_of_each_entry,
    towards_the_leaf,
    rows_of_heads,
]


@pytest.mark.parametrize(
    ("vocab", "mesh"), [(13, fp.Mesh(pp=2, dp=2, tp=2)), (5, fp.Mesh(tp=4))], ids=["uneven", "a rank without a row"]
)
@pytest.mark.parametrize("function", WHOLE_LEAF, ids=lambda f: f.__name__)
def test_a_map_of_the_whole_leaf_is_the_same_however_it_is_cut_and_padded(function, vocab, mesh):
    program = fp.compose(fp.on_reduced_gradients(function), TIE, *RANKS)(small_llama(vocab=vocab, kv_heads=4))
    fp.testing.assert_equivalent(program, mesh, steps=2, optimizer=fp.optim.sgd(lr=0.1), donate=True)


@pytest.mark.parametrize("function", [towards_the_leaf, noise_of_each_entry], ids=lambda f: f.__name__)
def test_the_parameter_comes_in_the_dtype_of_the_gradient(function):
    program = fp.compose(fp.on_reduced_gradients(function), *RANKS)(small_llama())
    found = oracle.train_on(program, MESH, BATCHES[:1], dtype=torch.bfloat16)
    assert all(x.dtype == torch.bfloat16 for x in found.run.weights.values())


def test_a_map_may_return_a_view_of_its_gradient():
    def turned(grad, leaf):
        return grad.mT

    one = fp.compose(fp.on_reduced_gradients(lambda grad, leaf: grad.mT.clone(), "square"))(squared())
    two = fp.compose(fp.on_reduced_gradients(turned, "square"))(squared())
    batch = {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))}
    runs = [oracle.train_on(program, fp.Mesh(), [batch]).run for program in (one, two)]
    oracle.same_bits(*runs)


def squared():
    """A model of one square leaf."""
    params = {"square": fp.Param((6, 6), "a b", fp.init.normal(0.5))}
    return fp.Model(
        params,
        [("only", "square", lambda p, x, par: x["x"] @ p)],
        lambda p, x, par: (x.square().sum(), len(x)),
        {"x": fp.Input((None, 6), torch.float32)},
        count=lambda batch: torch.tensor(len(batch["x"])),
    )


@pytest.mark.parametrize("function", SIZED, ids=lambda f: f.__name__)
def test_what_depends_on_the_size_of_a_shard_is_refused_when_composed(function):
    on, message = SIZED[function]
    where = f"{on.__name__}({function.__name__}) on mlp.up, transforms/wrong_maps.py:"
    with pytest.raises(fp.ParallelError, match=re.escape(where) + ".*" + re.escape(message)):
        refused(function, on)()


def test_a_sum_over_a_dim_of_a_leaf_without_dims_is_the_leaf():
    def summed(grad, leaf):
        return grad.sum(-1)

    program = fp.compose(fp.on_local_gradients(summed, "odds"), fp.dp_reduce())
    params = {"odds": fp.Param((), "", fp.init.ones())}
    model = fp.Model(
        params,
        [("only", "odds", lambda p, x, par: x["x"] * p)],
        lambda p, x, par: (x.square().sum(), len(x)),
        {"x": fp.Input((None, 6), torch.float32)},
        count=lambda batch: torch.tensor(len(batch["x"])),
    )
    assert program(model).plan(fp.Mesh(dp=2)).specs["odds"].pending == ("ep", "dp")


def test_leaves_that_differ_in_their_path_alone_are_followed_once_unless_a_map_asks_for_it():
    calls = []

    def counted(grad, leaf):
        calls.append(grad.shape)
        return grad * leaf.spec.shape[0]

    def by_name(grad, leaf):
        if leaf.path == "blocks.3.mlp.up.weight":
            return grad.sign()
        return grad

    def times(blocks):
        calls.clear()
        fp.compose(fp.on_local_gradients(counted, "blocks.*"), *RANKS)(small_gpt(blocks=blocks))
        return len(calls)

    assert times(2) == times(4) > 0
    with pytest.raises(MissingCollective, match=r"on_local_gradients\(by_name\) on blocks.3.mlp.up.weight"):
        fp.compose(fp.on_local_gradients(by_name), *RANKS)(small_gpt(blocks=4))
