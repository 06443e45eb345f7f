"""Param, Spec and debts: where a leaf lies, who counts it and who pays for it."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par import Debt, Mesh, ModelError, Param, Spec, init
from functional_par.mesh import AXES

meshes = st.builds(Mesh, ep=st.integers(1, 2), pp=st.integers(1, 3), dp=st.integers(1, 3), tp=st.integers(1, 4))


def spec(shape=(5, 4), names=("vocab", "embed"), axes=("tp", None), **options):
    return Spec("w", shape, names, axes, **options)


def test_a_param_names_its_dims():
    param = Param([6, 4, 2], "heads head  embed")
    assert (param.shape, param.names, param.trainable) == ((6, 4, 2), ("heads", "head", "embed"), True)
    assert param.init == init.normal(0.02)
    assert Param((), "").names == ()


def test_params_are_values():
    assert Param((2,), "embed") == Param((2,), "embed")
    assert Param((2,), "embed") != Param((2,), "embed", init.ones())
    assert Param((2,), "embed") != Param((2,), "embed", trainable=False)


@pytest.mark.parametrize("dims", ["vocab", "vocab embed head", ""])
def test_sizes_and_names_come_in_equal_numbers(dims):
    message = (
        f"Param(shape=(3, 4), dims={dims!r}): 2 sizes but {len(dims.split())} names. Name every dim once, in order"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        Param((3, 4), dims)


@pytest.mark.parametrize("size", [0, -2, 1.5, "3"])
def test_a_size_is_a_positive_integer(size):
    message = f"Param(dims='vocab embed'): size {size!r} of dim 'embed' is not a positive integer."
    with pytest.raises(ModelError, match=re.escape(message)):
        Param((3, size), "vocab embed")


@pytest.mark.parametrize("name", ["vocab@tp", "3d", "a-b", "(vocab"])
def test_a_dim_is_a_word(name):
    message = f"Param(dims='{name} embed'): {name!r} is not a name; dims are words such as 'embed'."
    with pytest.raises(ModelError, match=re.escape(message)):
        Param((3, 4), f"{name} embed")


def test_a_spec_reads_like_einops():
    assert str(spec()) == "vocab@tp embed"
    assert str(spec(axes=(None, None))) == "vocab embed"
    assert spec(axes=(None, "tp")).sharded == ("tp",)
    assert spec(axes=(None, None)).sharded == ()


@given(meshes, st.integers(1, 40), st.integers(1, 4))
def test_shards_tile_the_leaf_and_the_last_are_padded(mesh, vocab, embed):
    leaf = spec((vocab, embed))
    rows = -(-vocab // mesh.tp)
    assert leaf.local_shape(mesh) == (rows, embed)
    seen = {leaf.starts(mesh, coords) for coords in mesh}
    assert seen == {(rows * i, 0) for i in range(mesh.tp)}
    assert rows * mesh.tp >= vocab


@given(meshes, st.lists(st.sampled_from(["ep", "dp", "tp"]), unique=True), st.booleans(), st.data())
def test_payers_are_the_ranks_that_differ_along_the_owed_axes_alone(mesh, axes, tied, data):
    stages = tuple(sorted(data.draw(st.sets(st.integers(0, mesh.pp - 1), min_size=1)))) if tied else (0,)
    owed = [axis for axis in AXES if axis in axes or (axis == "pp" and len(stages) > 1)]
    leaf = spec(owners=stages, owes=tuple(Debt(axis, "because") for axis in owed))
    for rank, here in enumerate(mesh):
        if here.pp not in stages:
            continue
        expected = tuple(
            r
            for r, there in enumerate(mesh)
            if all(getattr(here, a) == getattr(there, a) for a in AXES if a not in owed)
            and ("pp" not in owed or there.pp in stages)
        )
        assert leaf.payers(mesh, rank) == expected


@given(meshes, st.booleans(), st.data())
def test_every_shard_is_counted_by_exactly_one_rank(mesh, sharded, data):
    stages = tuple(sorted(data.draw(st.sets(st.integers(0, mesh.pp - 1), min_size=1))))
    leaf = spec(axes=("tp" if sharded else None, None), owners=stages)
    counting = [coords for coords in mesh if leaf.counted_by(coords)]
    assert sorted(coords.tp for coords in counting) == list(range(mesh.tp if sharded else 1))
    assert {(c.ep, c.pp, c.dp, c.cp) for c in counting} == {(0, stages[0], 0, 0)}


def test_nothing_owed_is_paid_alone():
    assert all(spec().payers(Mesh(dp=2, tp=2), rank) == (rank,) for rank in range(4))


def test_a_leaf_that_is_tied_over_three_of_four_stages_is_paid_by_those():
    leaf = spec(owners=(0, 1, 3), owes=(Debt("pp", "tied"), Debt("dp", "data")))
    mesh = Mesh(pp=4, dp=2)
    assert [leaf.payers(mesh, rank) for rank in (0, 3, 7)] == [(0, 1, 2, 3, 6, 7)] * 3
    assert [rank for rank, dp in product(range(8), [0]) if leaf.counted_by(mesh.coords(rank))] == [0]
