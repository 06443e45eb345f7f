"""What every kind of leaf of gpt and llama owes, in both modes: the table of what replicated and split compute leave."""

import pytest

import functional_par as fp

AR, RS = "ALL_REDUCE", "REDUCE_SCATTER"

WHOLE = {"norm1", "norm2", "norm", "position"}
"""Leaves that every rank has whole and that meet the stream."""


def owed(model, mode, tp, **mesh):
    program = fp.compose(fp.shard_tp(mode=mode), fp.dp_reduce(), fp.stage_pp())(model)
    specs = program.plan(fp.Mesh(tp=tp, **mesh)).specs
    return {path: (tuple(debt.axis for debt in spec.owes), "tp" in spec.axes) for path, spec in specs.items()}


def kind(path):
    """("blocks.0.attn.out.bias") -> ("out", "bias")"""
    return tuple(path.split(".")[-2:])


@pytest.mark.parametrize("mode", [AR, RS])
@pytest.mark.parametrize("tp", [1, 4])
def test_leaves_of_gpt_owe_tp_where_they_are_whole_and_the_stream_is_split(mode, tp):
    model = fp.models.gpt(vocab=50, d_model=16, n_layers=1, n_heads=4, seq_len=8)
    found = owed(model, mode, tp, dp=2)
    assert len(found) == len(model.leaves)
    for path, (axes, cut) in found.items():
        name, leaf = kind(path)
        whole = name in WHOLE or (name in ("out", "down") and leaf == "bias")
        assert cut == (not whole), path
        assert axes == (("ep", "dp", "tp") if whole and mode == RS else ("ep", "dp")), path


@pytest.mark.parametrize("mode", [AR, RS])
@pytest.mark.parametrize(("heads", "kv_heads", "tp"), [(4, 2, 2), (4, 2, 4), (4, 1, 2), (6, 2, 3)])
def test_leaves_of_llama_owe_tp_also_where_split_heads_read_whole_keys(mode, heads, kv_heads, tp):
    model = fp.models.llama(
        vocab=50, d_model=4 * heads, n_layers=1, n_heads=heads, n_kv_heads=kv_heads, seq_len=12, d_ff=24
    )
    for path, (axes, cut) in owed(model, mode, tp, dp=2).items():
        name, _ = kind(path)
        keys = name in ("k", "v") and kv_heads % tp > 0
        assert cut == (name not in WHOLE and not keys), path
        partial = keys or (name in WHOLE and mode == RS)
        assert axes == (("ep", "dp", "tp") if partial else ("ep", "dp")), path


@pytest.mark.parametrize("mode", [AR, RS])
def test_a_tied_head_over_stages_owes_pp_and_what_its_places_owe(mode):
    model = fp.models.gpt(vocab=50, d_model=16, n_layers=1, n_heads=4, seq_len=8)
    tie = fp.tie("head.weight", "embed.weight")
    program = fp.compose(tie, fp.shard_tp(mode=mode), fp.dp_reduce(), fp.stage_pp())(model)
    specs = program.plan(fp.Mesh(tp=2, dp=2, pp=2)).specs
    assert [debt.axis for debt in specs["embed.weight"].owes] == ["ep", "pp", "dp"]
    assert "head.weight" not in specs


def test_a_debt_names_the_layer_and_the_line():
    model = fp.models.gpt(vocab=50, d_model=16, n_layers=1, n_heads=4, seq_len=8)
    specs = fp.compose(fp.shard_tp(mode=RS))(model).plan(fp.Mesh(tp=2)).specs
    (debt,) = specs["blocks.0.norm1.weight"].owes
    assert (debt.axis, debt.layer) == ("tp", "block0")
    assert debt.place.startswith("models/gpt.py:")
    assert "(in fp.nn.layer_norm)" in debt.place


def test_without_dp_reduce_and_shard_tp_nothing_is_owed():
    model = fp.models.llama(vocab=50, d_model=16, n_layers=1, n_heads=4, seq_len=8)
    assert {axes for axes, _ in owed_plain(model).values()} == {()}


def owed_plain(model):
    specs = fp.compose(fp.stage_pp())(model).plan(fp.Mesh(pp=2)).specs
    return {path: (spec.owes, spec.axes) for path, spec in specs.items()}
