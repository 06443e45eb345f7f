"""Buckets: who sums what with whom, and that everybody agrees."""

from __future__ import annotations

import functools
from itertools import combinations

import pytest
import torch

import functional_par as fp
from functional_par import Mesh
from functional_par.comm.solo import Done
from functional_par.reduce import ALIGNMENT, Gradients, buckets, groups

from .toys import odd, small_gpt, small_llama

TIE = fp.tie("head.weight", "embed.weight")

PROGRAMS = {
    "gpt": lambda: fp.compose(TIE, fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(), fp.dp_reduce())(small_gpt()),
    "llama": lambda: fp.compose(fp.shard_tp("ALL_REDUCE"), fp.stage_pp(), fp.dp_reduce())(small_llama()),
    "odd": lambda: fp.compose(fp.shard_tp(), fp.stage_pp(), fp.dp_reduce())(odd(trainable_scale=False)),
}

MESHES = [Mesh(), Mesh(dp=2), Mesh(tp=4), Mesh(pp=4), Mesh(ep=2, pp=3, dp=2, tp=2), Mesh(pp=2, dp=3, tp=2)]


@functools.cache
def plan_of(name, mesh):
    return program_of(name).plan(mesh)


@functools.cache
def program_of(name):
    return PROGRAMS[name]()


every_plan = pytest.mark.parametrize(
    "plan", [pytest.param((name, mesh), id=f"{name}-{mesh}") for name in PROGRAMS for mesh in MESHES]
)


@every_plan
def test_the_buckets_of_a_rank_hold_each_of_its_trainable_leaves_once(plan):
    plan = plan_of(*plan)
    for rank, coords in enumerate(plan.mesh):
        held = [path for bucket in buckets(plan, rank) for path in bucket.paths]
        assert sorted(held) == sorted(path for path in plan.held(coords.pp) if plan.specs[path].trainable)
        for bucket in buckets(plan, rank):
            assert list(bucket.paths) == sorted(bucket.paths)
            assert rank in bucket.ranks


@every_plan
def test_every_rank_of_a_bucket_has_the_same_bucket(plan):
    plan = plan_of(*plan)
    for rank in range(plan.mesh.size):
        for bucket in buckets(plan, rank):
            for other in bucket.ranks:
                (same,) = [b for b in buckets(plan, other) if b.ranks == bucket.ranks]
                assert same == bucket
                assert same.label == bucket.label
                assert same.elements(plan) == bucket.elements(plan)


@every_plan
def test_any_two_ranks_meet_in_their_common_buckets_in_one_order(plan):
    plan = plan_of(*plan)
    for a, b in combinations(range(plan.mesh.size), 2):
        mine, theirs = ([bucket.ranks for bucket in buckets(plan, rank)] for rank in (a, b))
        common = set(mine) & set(theirs)
        assert [ranks for ranks in mine if ranks in common] == [ranks for ranks in theirs if ranks in common]


@every_plan
def test_a_leaf_is_summed_over_the_ranks_that_hold_the_same_shard_and_differ_along_what_it_owes(plan):
    plan = plan_of(*plan)
    for rank, coords in enumerate(plan.mesh):
        for bucket in buckets(plan, rank):
            for path in bucket.paths:
                spec = plan.specs[path]
                axes = {debt.axis for debt in spec.owes}
                assert bucket.ranks == tuple(
                    r
                    for r, there in enumerate(plan.mesh)
                    if all(a in axes or getattr(there, a) == getattr(coords, a) for a in there._fields)
                    and there.pp in (spec.owners if "pp" in axes else (coords.pp,))
                )
                assert set(bucket.axes) == {axis for axis in axes if plan.mesh.sizes[axis] > 1}


@every_plan
def test_groups_are_the_union_of_the_buckets_of_all_ranks(plan):
    plan = plan_of(*plan)
    union = {bucket.ranks for rank in range(plan.mesh.size) for bucket in buckets(plan, rank)}
    assert groups(plan) == tuple(sorted(ranks for ranks in union if len(ranks) > 1))


def test_labels_name_the_axes_of_the_sum():
    plan = plan_of("gpt", Mesh(pp=2, dp=3, tp=2))
    labels = {path: bucket.label for bucket in buckets(plan, 0) for path in bucket.paths}
    assert labels["embed.weight"] == "pp+dp"
    assert labels["blocks.0.attn.q.weight"] == "dp"
    assert labels["blocks.0.norm1.weight"] == "dp+tp"
    assert {bucket.label for bucket in buckets(plan_of("gpt", Mesh()), 0)} == {"none"}


def test_tied_shards_of_different_tp_ranks_are_never_summed():
    plan = plan_of("gpt", Mesh(pp=2, dp=3, tp=2))
    for rank, coords in enumerate(plan.mesh):
        for bucket in buckets(plan, rank):
            if "embed.weight" in bucket.paths:
                assert {plan.mesh.coords(r).tp for r in bucket.ranks} == {coords.tp}
                assert len(bucket.ranks) == 6


def gradients(dtype=torch.float32):
    plan = plan_of("gpt", Mesh(pp=2, dp=3, tp=2))
    return plan, Gradients(plan, buckets(plan, 0), dtype, torch.device("cpu"))


def test_gradients_are_views_of_one_buffer_a_bucket_at_aligned_places():
    plan, grads = gradients()
    assert len(grads.flat) == len(buckets(plan, 0)) == 3
    views = grads.views(plan)
    for bucket, flat in zip(grads.buckets, grads.flat, strict=True):
        assert flat.numel() == bucket.elements(plan)
        start = 0
        for path in bucket.paths:
            view = views[path]
            assert view.shape == plan.specs[path].local_shape(plan.mesh)
            assert view.data_ptr() == flat.data_ptr() + start * flat.element_size()
            assert start % ALIGNMENT == 0
            start += -(-view.numel() // ALIGNMENT) * ALIGNMENT


def test_gradients_of_later_microbatches_are_added_in_the_accumulation_dtype():
    _, grads = gradients()
    path = "embed.weight"
    shape = grads.leaves[path].shape
    first, second = torch.full(shape, 1.0, dtype=torch.bfloat16), torch.full(shape, 2.0**-10, dtype=torch.bfloat16)
    grads.add({path: first})
    grads.add({path: second})
    assert grads.leaves[path].dtype == torch.float32
    assert torch.equal(grads.leaves[path], torch.full(shape, 1.0 + 2.0**-10))
    assert all(not leaf.any() for other, leaf in grads.leaves.items() if other != path)


class Twice:
    """A world in which every rank has what this one has."""

    def __init__(self):
        self.calls = []

    def subgroup(self, ranks, label):
        self.calls.append((ranks, label))
        return self

    def start(self, op, x, donate=False):
        return Done(x * len(self.calls[-1][0]))


def test_paying_is_one_collective_a_bucket_and_none_where_nothing_is_owed():
    for name, mesh, n in [("gpt", Mesh(pp=2, dp=3, tp=2), 3), ("llama", Mesh(tp=4), 1), ("gpt", Mesh(), 0)]:
        plan = plan_of(name, mesh)
        grads, world = Gradients(plan, buckets(plan, 0), torch.float32, torch.device("cpu")), Twice()
        grads.add({path: torch.ones_like(leaf) for path, leaf in grads.leaves.items()})
        grads.pay(world)
        assert len(world.calls) == n
        assert world.calls == [(b.ranks, b.label) for b in buckets(plan, 0) if len(b.ranks) > 1]
        for bucket in buckets(plan, 0):
            for path in bucket.paths:
                assert (grads.views(plan)[path] == len(bucket.ranks)).all()
