"""Cutting named dims over tp."""

from __future__ import annotations

import re

import pytest

import functional_par as fp
from functional_par import CompositionError, Mesh, Model, Param, TensorParallelLinearMode, TensorParallelMode

from ..toys import small_gpt, small_llama


def one_leaf(shape, dims):
    """A model of one leaf, which nothing but its sum reads."""
    return Model({"w": Param(shape, dims)}, [("x", "w", lambda p, x, par: p)], lambda p, x, par: (x.sum(), 1))


def spec_of(shape, names, tp, **options):
    """The spec of one leaf, where the trace has no say."""
    plan = fp.compose()(one_leaf(shape, names)).plan(Mesh())
    return fp.shard_tp(**options)(fp.Plan.start(plan.source, Mesh(tp=tp), {})).specs["w"]


@pytest.mark.parametrize(
    ("shape", "dims", "spec", "local"),
    [
        ((33, 4), "vocab embed", "vocab@tp embed", (9, 4)),
        ((32, 4), "vocab embed", "vocab@tp embed", (8, 4)),
        ((3, 4), "vocab embed", "vocab@tp embed", (1, 4)),
        ((8, 2, 4), "heads head embed", "heads@tp head embed", (2, 2, 4)),
        ((4, 8, 2), "embed heads head", "embed heads@tp head", (4, 2, 2)),
        ((8, 2, 4), "kv_heads head embed", "kv_heads@tp head embed", (2, 2, 4)),
        ((2, 2, 4), "kv_heads head embed", "kv_heads head embed", (2, 2, 4)),
        ((6, 2, 4), "kv_heads head embed", "kv_heads head embed", (6, 2, 4)),
        ((12, 5), "ffn embed", "ffn@tp embed", (3, 5)),
        ((12,), "ffn", "ffn@tp", (3,)),
        ((5, 7), "embed seq", "embed seq", (5, 7)),
    ],
)
def test_dims_are_cut_by_their_names(shape, dims, spec, local):
    found = spec_of(shape, dims, 4)
    assert str(found) == spec
    assert found.local_shape(Mesh(tp=4)) == local


@pytest.mark.parametrize(("dims", "size"), [("heads", 6), ("ffn", 10), ("ffn", 2)])
def test_a_dim_that_tp_does_not_divide_is_refused_with_the_numbers(dims, size):
    message = (
        f"shard_tp: dim {dims!r} of w has size {size}, which tp=4 does not divide ({size} % 4 = {size % 4}). "
        f"Choose a tp that divides {size}, or change the model."
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        spec_of((size, 3), f"{dims} embed", 4)


def test_heads_that_tp_does_not_divide_are_refused_by_plan():
    program = fp.compose(fp.shard_tp())(small_gpt(heads=4))
    message = "shard_tp: dim 'heads' of blocks.0.attn.q.weight has size 4, which tp=8 does not divide (4 % 8 = 4)."
    with pytest.raises(CompositionError, match=re.escape(message)):
        program.plan(Mesh(tp=8))


def test_a_leaf_with_two_dims_for_tp_is_refused_at_compose():
    message = (
        "shard_tp: w has the dims 'vocab', 'ffn' (vocab embed ffn), and more than one of them would lie on tp. Rename one, "
        "or pass shard_tp(dims={...}) with the dims to cut."
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(fp.shard_tp())(one_leaf((4, 2, 4), "vocab embed ffn"))


def test_custom_dims_replace_the_rules():
    assert str(spec_of((4, 2, 4), "vocab embed ffn", 2, dims={"ffn": "error"})) == "vocab embed ffn@tp"
    assert str(spec_of((5, 3), "experts embed", 2, dims={"experts": "pad"})) == "experts@tp embed"
    assert str(spec_of((5, 3), "experts embed", 2, dims={"experts": "replicate"})) == "experts embed"
    assert str(spec_of((4, 3), "vocab embed", 2, dims={})) == "vocab embed"
    with pytest.raises(CompositionError, match="dim 'experts' of w has size 5, which tp=2 does not divide"):
        spec_of((5, 3), "experts embed", 2, dims={"experts": "error"})


def test_an_unknown_rule_is_refused():
    message = "shard_tp(dims={'ffn': 'drop'}): the rule is 'error', 'pad' or 'replicate'."
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.shard_tp(dims={"ffn": "drop"})


@pytest.mark.parametrize(
    "spelt", ["REDUCE_SCATTER", "reduce_scatter", "Reduce-Scatter", TensorParallelMode.REDUCE_SCATTER]
)
def test_modes_are_members_or_names_in_any_spelling(spelt):
    assert fp.shard_tp(spelt) == fp.shard_tp(TensorParallelLinearMode.REDUCE_SCATTER)
    assert fp.shard_tp() == fp.shard_tp("all-reduce")


@pytest.mark.parametrize("mode", ["ALLREDUCE", "", None, 1])
def test_an_unknown_mode_is_refused(mode):
    with pytest.raises(
        CompositionError, match=re.escape(f"tp mode {mode!r}: it is one of ALL_REDUCE, REDUCE_SCATTER.")
    ):
        fp.shard_tp(mode)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_async_comm_is_a_boolean(value):
    with pytest.raises(CompositionError, match=re.escape(f"shard_tp(async_comm={value!r}): it is True or False.")):
        fp.shard_tp(async_comm=value)


def owing(plan, axis):
    return {path for path, spec in plan.specs.items() if axis in {debt.axis for debt in spec.owes}}


def test_in_all_reduce_no_replicated_leaf_of_gpt_owes_tp():
    assert owing(fp.compose(fp.shard_tp("ALL_REDUCE"))(small_gpt()).plan(Mesh(tp=2)), "tp") == set()


def test_in_reduce_scatter_every_replicated_leaf_of_gpt_owes_tp():
    plan = fp.compose(fp.shard_tp("REDUCE_SCATTER"))(small_gpt()).plan(Mesh(tp=2))
    assert owing(plan, "tp") == {path for path, spec in plan.specs.items() if "tp" not in spec.axes}
    assert "norm.weight" in owing(plan, "tp")
    assert "blocks.0.attn.out.bias" in owing(plan, "tp")


@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_key_value_heads_that_stay_whole_owe_tp_in_both_modes(mode):
    plan = fp.compose(fp.shard_tp(mode))(small_llama(kv_heads=2)).plan(Mesh(tp=4))
    for name in ("k", "v"):
        assert str(plan.specs[f"blocks.1.attn.{name}.weight"]) == "kv_heads head embed"
        assert f"blocks.1.attn.{name}.weight" in owing(plan, "tp")
    assert not any("tp" in plan.specs[path].axes for path in owing(plan, "tp"))


def test_a_dim_that_no_leaf_has_is_refused_with_the_nearest_name():
    with pytest.raises(
        CompositionError, match=re.escape("no leaf has a dim 'fnn'. Did you mean 'ffn'? Dims of this model: ")
    ):
        fp.compose(fp.shard_tp(dims={"vocab": "pad", "fnn": "error"}))(small_gpt())
    with pytest.raises(
        CompositionError, match=re.escape("no leaf has a dim 'experts'. Dims of this model: vocab, embed,")
    ):
        fp.compose(fp.shard_tp(dims={"experts": "error"}))(small_gpt())
