"""Leaves as functions of other leaves: what layers read, what the new leaves owe, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import functional_par as fp
from functional_par import CompositionError, ModelError, tree
from tests import oracle
from tests.toys import odd, small_gpt, small_llama

BATCHES = [oracle.token_batch(13, 12, 4, seed) for seed in range(3)]


def frozen(*patterns):
    return fp.reparam(*patterns, leaves=lambda path, leaf: replace(leaf, trainable=False))


def adapters(*patterns, rank=2):
    def leaves(path, w):
        (n_out, n_in), (out, into) = w.shape, w.names
        return {
            "w": replace(w, trainable=False),
            "a": fp.Param((rank, n_in), f"rank {into}", fp.init.normal(0.4)),
            "b": fp.Param((n_out, rank), f"{out} rank", fp.init.normal(0.4)),
        }

    return fp.reparam(*patterns, leaves=leaves, value=lambda p, par: p["w"] + 0.5 * p["b"] @ p["a"])


def normed(*patterns):
    """Weight normalisation: every row of the weight has the length in ``g``."""

    def leaves(path, w):
        return {"v": w, "g": fp.Param((w.shape[0],), w.names[0], fp.init.uniform(0.5, 1.5))}

    return fp.reparam(
        *patterns, leaves=leaves, value=lambda p, par: p["g"][:, None] * p["v"] / p["v"].norm(dim=1, keepdim=True)
    )


RANKS = (fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(microbatches=2), fp.dp_reduce())
MESH = fp.Mesh(pp=2, dp=2, tp=2)


@pytest.mark.parametrize(
    ("make", "own"),
    [
        (small_gpt, [adapters("blocks.*.mlp.*.weight")]),
        (small_gpt, [adapters("blocks.0.mlp.up.weight"), frozen("embed.*", "blocks.*.attn.*", "norm.*")]),
        (
            small_llama,
            [normed("blocks.*.mlp.up.weight", "blocks.1.mlp.gate.weight"), fp.tie("head.weight", "embed.weight")],
        ),
    ],
    ids=["adapters", "adapters, others frozen", "weight norm, tied"],
)
def test_a_reparametrised_model_trains_the_same_in_every_layout(make, own):
    program = fp.compose(*own, *RANKS)(make())
    expected = oracle.train(program.model, BATCHES, clip=0.5)
    expected = oracle.Run(
        expected.losses, expected.norms, expected.tokens, oracle.untie(expected.weights, program.plan(MESH))
    )
    oracle.equal_runs(oracle.train_on(program, MESH, BATCHES, clip=0.5).run, expected)


def test_the_value_is_what_layers_read_and_frozen_leaves_stay():
    program = fp.compose(adapters("blocks.0.mlp.up.weight"), frozen("head.*"))(small_gpt())
    leaves = tree.flatten(program.source.init(0, torch.float64))
    merged = {path: x for path, x in leaves.items() if ".weight." not in path}
    w, a, b = (leaves[f"blocks.0.mlp.up.weight.{name}"] for name in "wab")
    merged["blocks.0.mlp.up.weight"] = w + 0.5 * b @ a
    batch = BATCHES[0]
    plain = small_gpt()(tree.unflatten(merged), batch)
    assert torch.equal(program.source(tree.unflatten(leaves), batch), plain)
    after = oracle.train_on(program, fp.Mesh(), BATCHES).run.weights
    assert {path for path, x in after.items() if torch.equal(x, leaves[path])} == {
        "blocks.0.mlp.up.weight.w",
        "head.weight",
    }


def test_new_leaves_owe_what_follows_from_how_they_are_cut():
    program = fp.compose(adapters("blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight"), *RANKS)(small_gpt())
    specs = program.plan(MESH).specs
    shown = {
        path.removeprefix("blocks.0.mlp."): (str(specs[path]), specs[path].pending)
        for path in specs
        if ".mlp." in path and path.startswith("blocks.0")
    }
    assert shown["up.weight.a"] == ("rank embed", ("ep", "dp", "tp"))
    assert shown["up.weight.b"] == ("ffn@tp rank", ("ep", "dp"))
    assert shown["down.weight.a"] == ("rank ffn@tp", ("ep", "dp"))
    assert shown["down.weight.b"] == ("embed rank", ("ep", "dp", "tp"))
    assert shown["up.weight.w"] == ("ffn@tp embed", ())


def test_the_order_among_other_transforms_has_no_effect():
    own = frozen("embed.*")
    tie = fp.tie("blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight")
    plans = [fp.compose(*order)(small_gpt()).plan(MESH) for order in ((own, tie, *RANKS), (*RANKS[::-1], tie, own))]
    assert plans[0].specs == plans[1].specs
    assert plans[0].aliases == plans[1].aliases


def test_one_reparam_acts_on_what_the_one_before_made():
    program = fp.compose(adapters("blocks.0.mlp.up.weight"), frozen("blocks.0.mlp.up.weight.a"))(small_gpt())
    trainable = {
        path.rpartition(".")[2]: leaf.trainable for path, leaf in program.source.leaves.items() if "up.weight." in path
    }
    assert trainable == {"w": False, "a": False, "b": True}
    with pytest.raises(
        CompositionError, match=re.escape("reparam: no leaf matches 'blocks.0.mlp.up.weight.a'. Leaves: ")
    ):
        fp.compose(frozen("blocks.0.mlp.up.weight.a"), adapters("blocks.0.mlp.up.weight"))(small_gpt())


def test_a_leaf_that_is_all_a_layer_reads_and_one_of_the_loss_are_replaced_too():
    def doubled(path, leaf):
        return {"half": leaf}

    own = fp.reparam("scale", "temperature", leaves=doubled, value=lambda p, par: p["half"] * 2)
    model = fp.compose(own)(odd()).source
    leaves = tree.flatten(model.init(0, torch.float64))
    plain = {path.removesuffix(".half"): x * (2 if path.endswith(".half") else 1) for path, x in leaves.items()}
    batch = oracle.token_batch(11, 6, 5)
    assert torch.equal(model(tree.unflatten(leaves), batch), odd()(tree.unflatten(plain), batch))


def test_layers_of_one_function_are_still_traced_once():
    model = fp.compose(adapters("blocks.*.mlp.up.weight"))(small_gpt(blocks=4)).source
    assert len({id(layer.fn) for layer in model.layers if layer.name.startswith("block")}) == 1


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda: fp.reparam(leaves=lambda p, w: w), "reparam(): name the leaves by patterns, such as"),
        (lambda: fp.reparam("x", leaves=3), "reparam(leaves=3): it is a function."),
        (lambda: fp.reparam("x", leaves=lambda p, w: w, value=3), "reparam(value=3): it is a function."),
        (lambda: frozen("heads.*"), "reparam: no leaf matches 'heads.*'. Leaves: "),
        (
            lambda: fp.reparam("norm.*", leaves=lambda p, w: {"a": 1}),
            "reparam: the new leaves of norm.weight are {'a': 1}; give an fp.Param",
        ),
        (
            lambda: fp.reparam("norm.*", leaves=lambda p, w: {}, value=lambda p, par: p),
            "reparam: norm.weight becomes no leaf at all; give an fp.Param, or a dict of some.",
        ),
        (
            lambda: fp.reparam("norm.*", leaves=lambda p, w: {"": w}, value=lambda p, par: p[""]),
            "give an fp.Param, or a dict of a few by name, without dots.",
        ),
        (
            lambda: fp.reparam("norm.*", leaves=lambda p, w: {"a": w, "b": w}),
            "reparam: norm.weight becomes the leaves a, b, so value=... has to say what layers read in its place.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_when_composed(own, message):
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(own())(small_gpt())


def test_new_leaves_that_cannot_be_made_are_told_with_the_leaf():
    message = "reparam: leaves(...) failed for blocks.0.attn.q.weight (heads head embed, [4, 2, 8]): ValueError: "
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(adapters("blocks.*.attn.q.weight"))(small_gpt())


def test_a_value_that_is_no_tensor_is_refused_with_the_layer():
    own = fp.reparam("norm.weight", leaves=lambda p, w: w, value=lambda w, par: 3)
    with pytest.raises(ModelError, match=r"layer .*reparam\(value=\.\.\.\): it returns int, not a tensor"):
        fp.compose(own)(small_gpt())


def test_a_value_with_a_superfluous_collective_is_refused_with_its_line():
    def value(p, par):
        return p["v"] * par.psum(p["g"], "tp")

    own = fp.reparam(
        "blocks.0.mlp.up.weight",
        leaves=lambda path, w: {"v": w, "g": fp.Param((), "", fp.init.ones())},
        value=value,
    )
    message = "layer 'block0', transforms/test_reparam.py"
    with pytest.raises(fp.SuperfluousCollective, match=message + r".*`return p\[\"v\"\] \* par.psum.*already the same"):
        fp.compose(own, *RANKS)(small_gpt()).plan(MESH)
