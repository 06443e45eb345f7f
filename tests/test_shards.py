"""Between whole trees and shards: each rank's part, and back, to the bit."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_par as fp
from functional_par import Mesh, StateError, tree

from .oracle import adamw
from .toys import odd, small_gpt

VOCAB = 13


@functools.cache
def program(tied=True):
    ties = [fp.tie("head.weight", "embed.weight")] if tied else []
    return fp.compose(*ties, fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(), fp.dp_reduce())(small_gpt(VOCAB, blocks=1))


@functools.cache
def whole(tied=True):
    return program(tied).source.init(3, torch.float64)


def equal_trees(a, b):
    a, b = tree.flatten(a), tree.flatten(b)
    assert a.keys() == b.keys()
    for path in a:
        assert torch.equal(a[path], b[path]), path


meshes = st.builds(
    Mesh, ep=st.integers(1, 2), pp=st.integers(1, 3), dp=st.integers(1, 2), tp=st.sampled_from([1, 2, 4])
)
few = settings(max_examples=max(8, settings.default.max_examples // 10))  # each takes a trace


@few
@given(meshes)
def test_unshard_is_the_inverse_of_shard(mesh):
    plan = program(False).plan(mesh)
    parts = [fp.shard(whole(False), plan, rank) for rank in range(mesh.size)]
    equal_trees(fp.unshard(parts, plan), whole(False))


@few
@given(meshes)
def test_unsharding_a_tied_model_gives_every_name_its_leaf(mesh):
    plan = program().plan(mesh)
    parts = [fp.shard(whole(), plan, rank) for rank in range(mesh.size)]
    back = fp.unshard(parts, plan)
    equal_trees(back, tree.unflatten(tree.flatten(whole()) | {"head.weight": whole()["embed"]["weight"]}))
    assert list(tree.flatten(back)) == list(plan.source.leaves)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_shard_is_the_slice_of_the_whole_and_padding_is_zero(tp):
    mesh = Mesh(pp=2, tp=tp)
    plan = program(False).plan(mesh)
    rows = -(-VOCAB // tp)
    padded = torch.zeros(rows * tp, 8, dtype=torch.float64)
    padded[:VOCAB] = whole(False)["embed"]["weight"]
    for rank, coords in enumerate(mesh):
        part = tree.flatten(fp.shard(whole(False), plan, rank))
        assert tuple(part) == plan.held(coords.pp)
        if coords.pp == 0:
            assert torch.equal(part["embed.weight"], padded[rows * coords.tp : rows * (coords.tp + 1)])
            assert torch.equal(part["position.weight"], whole(False)["position"]["weight"])


def test_a_shard_is_a_copy():
    plan = program().plan(Mesh())
    params = whole()
    part = fp.shard(params, plan, 0)
    part["norm"]["weight"].zero_()
    assert params["norm"]["weight"].any()


def test_more_ranks_than_rows_leave_some_with_padding_alone():
    model = fp.models.gpt(3, 8, 1, 8, 8, d_ff=8)
    plan = fp.compose(fp.shard_tp())(model).plan(Mesh(tp=8))
    params = model.init(0)
    parts = [fp.shard(params, plan, rank) for rank in range(8)]
    assert [bool(part["embed"]["weight"].any()) for part in parts] == [True] * 3 + [False] * 5
    equal_trees(fp.unshard(parts, plan), params)


@pytest.mark.parametrize("mesh", [Mesh(dp=2, pp=2, tp=2), Mesh(tp=4), Mesh(pp=3)], ids=str)
def test_a_step_starts_from_the_shards_of_the_whole_and_gathers_it_again(mesh):
    def main(world):
        step = program().step(world, adamw(), dtype=torch.float64)
        state = step.init(3)
        equal_trees(state.params, fp.shard(whole(), program().plan(mesh), world.rank))
        return state.params, step.gather(state)

    parts, gathered = zip(*fp.run(main, mesh), strict=True)
    expected = fp.unshard(parts, program().plan(mesh))
    for tree_of_rank in gathered:
        equal_trees(tree_of_rank, expected)


def test_gathered_weights_are_a_copy():
    def main(world):
        step = program().step(world, adamw(), dtype=torch.float64)
        state = step.init(3)
        before = {path: x.clone() for path, x in state.flat.items()}
        for leaf in tree.flatten(step.gather(state)).values():
            leaf.zero_()
        assert all(torch.equal(x, before[path]) for path, x in state.flat.items())

    for mesh in (Mesh(), Mesh(tp=2)):
        fp.run(main, mesh)


def test_initial_values_on_the_meta_device_have_the_shapes_of_the_shards():
    plan = program().plan(Mesh(pp=2, tp=4))
    params = tree.flatten(program().source.init(0, device="meta"))
    for rank in range(8):
        part = tree.flatten(fp.shard(tree.unflatten(params), plan, rank))
        assert {path: tuple(x.shape) for path, x in part.items()} == {
            path: plan.specs[path].local_shape(plan.mesh) for path in part
        }
        assert all(x.is_meta for x in part.values())


def test_a_missing_leaf_is_refused():
    plan = fp.compose()(odd()).plan(Mesh())
    params = plan.source.init(0)
    del params["scale"]
    with pytest.raises(StateError, match=r"shard: the tree has no leaf scale\."):
        fp.shard(params, plan, 0)


def test_a_leaf_of_another_shape_is_refused_with_both():
    plan = fp.compose()(odd()).plan(Mesh())
    params = plan.source.init(0) | {"scale": torch.ones(7)}
    with pytest.raises(StateError, match=re.escape("shard: scale has shape (7,), but its spec is embed (6,).")):
        fp.shard(params, plan, 0)


def test_unshard_needs_every_rank_and_every_leaf():
    plan = program().plan(Mesh(tp=2))
    parts = [fp.shard(whole(), plan, rank) for rank in range(2)]
    with pytest.raises(StateError, match=re.escape("unshard: 1 shards for Mesh(tp=2), which has 2 ranks.")):
        fp.unshard(parts[:1], plan)
    for part in parts:
        del part["norm"]
    with pytest.raises(StateError, match=r"unshard: no shard holds norm.weight, which belongs to pipeline rank 0\."):
        fp.unshard(parts, plan)
