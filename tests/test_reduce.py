"""Buckets: who sums what with whom, and that everybody agrees."""

from __future__ import annotations

import functools
import math
from itertools import combinations, pairwise

import pytest
import torch

import functional_par as fp
from functional_par import Mesh
from functional_par import step as step_module
from functional_par.accumulate import Memory, Whole
from functional_par.bucket import ALIGNMENT
from functional_par.buckets import buckets, groups
from functional_par.comm.solo import Done
from functional_par.reduce import Gradients

from .oracle import same_bits, token_batch, train_on
from .toys import odd, small_gpt, small_llama

TIE = fp.tie("head.weight", "embed.weight")

CPU = torch.device("cpu")
SMALL = 1e-3  # MiB: a few leaves in each bucket

PROGRAMS = {
    "gpt": lambda: fp.compose(TIE, fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(), fp.dp_reduce())(small_gpt()),
    "cut": lambda: fp.compose(TIE, fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(), fp.dp_reduce(bucket_mb=SMALL))(
        small_gpt()
    ),
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
            assert rank in bucket.ranks


@every_plan
def test_the_leaves_of_the_last_layers_come_first_and_no_bucket_is_larger_than_it_may_be(plan):
    plan = plan_of(*plan)
    for rank in range(plan.mesh.size):
        for ranks in {bucket.ranks for bucket in buckets(plan, rank)}:
            mine = [bucket for bucket in buckets(plan, rank) if bucket.ranks == ranks]
            first = [min(plan.readers[path]) for bucket in mine for path in bucket.paths]
            assert first == sorted(first, reverse=True)
            for bucket, after in pairwise(mine):
                with_next = 4 * (bucket.elements + -(-math.prod(after.shapes[0]) // ALIGNMENT) * ALIGNMENT)
                assert with_next > plan.bucket_mb * 2**20
            assert all(len(b.paths) == 1 or 4 * b.elements <= plan.bucket_mb * 2**20 for b in mine)


@every_plan
def test_any_two_ranks_have_the_same_common_buckets_in_one_order(plan):
    plan = plan_of(*plan)
    for a, b in combinations(range(plan.mesh.size), 2):
        mine, theirs = ([x for x in buckets(plan, rank) if {a, b} <= set(x.ranks)] for rank in (a, b))
        assert mine == theirs
        assert [x.label for x in mine] == [x.label for x in theirs]


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
    return plan, Gradients(plan, 0, Memory(dtype, CPU))


def test_gradients_are_views_of_one_buffer_a_bucket_at_aligned_places():
    plan, grads = gradients()
    grads.pay(Twice())
    assert len(grads.flat) == len(buckets(plan, 0)) == 3
    views = grads.views()
    for bucket, flat in zip(grads.buckets, grads.flat, strict=True):
        assert flat.numel() == bucket.elements
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
    cases = [("gpt", Mesh(pp=2, dp=3, tp=2), 3), ("cut", Mesh(dp=2), 6), ("llama", Mesh(tp=4), 1), ("gpt", Mesh(), 0)]
    for name, mesh, n in cases:
        plan = plan_of(name, mesh)
        grads, world = Gradients(plan, 0, Memory(torch.float32, CPU)), Twice()
        grads.add({path: torch.ones_like(leaf) for path, leaf in grads.leaves.items()})
        grads.pay(world)
        assert len(world.calls) == n
        assert world.calls == [(b.ranks, b.label) for b in buckets(plan, 0) if len(b.ranks) > 1]
        for bucket in buckets(plan, 0):
            for path in bucket.paths:
                assert (grads.views()[path] == len(bucket.ranks)).all()


def test_a_sum_starts_as_soon_as_a_bucket_is_full_and_at_the_end_where_it_spans_stages(monkeypatch):
    """On two stages with two chunks each, and with weight gradients that come later."""
    seen = []
    send = Whole._send

    def noted(self, world, flat):
        if world.rank in (0, 2):  # one rank of each stage
            seen.append((world.rank, self.bucket.label, str(world.record.doing)))
        return send(self, world, flat)

    monkeypatch.setattr(Whole, "_send", noted)
    parts = TIE, fp.stage_pp("interleaved-zb", 2), fp.dp_reduce(bucket_mb=SMALL)
    train_on(fp.compose(*parts)(small_gpt()), Mesh(pp=2, dp=2), [token_batch(13, 8, 4)])
    for rank in (0, 2):
        labels, doing = zip(*[(label, doing) for at, label, doing in seen if at == rank], strict=True)
        assert labels.count("pp+dp") == 1
        assert [when for label, when in zip(labels, doing, strict=True) if label == "pp+dp"] == [""]
        early = [when for label, when in zip(labels, doing, strict=True) if label == "dp"]
        assert len(early) >= 3
        assert all(when.startswith("weight-backward of microbatch 1 on stage") for when in early)
        if rank == 0:
            assert early[0] != early[-1]  # there one bucket ends with the second chunk of layers, one with the first


class Late(Gradients):
    """Sums that all start at the end."""

    def done(self, paths):
        pass


@pytest.mark.parametrize("mesh", [Mesh(dp=3, tp=2), Mesh(pp=2, dp=2)], ids=str)
@pytest.mark.parametrize("engine", ["func", "tape"])
def test_overlapped_sums_have_the_bits_of_late_ones_and_of_one_bucket(mesh, engine, monkeypatch):
    runs = []
    for late, size in [(False, SMALL), (True, SMALL), (False, 48.0)]:
        with monkeypatch.context() as patch:
            patch.setattr(step_module, "Gradients", Late if late else Gradients)
            parts = TIE, fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(microbatches=2), fp.dp_reduce(bucket_mb=size)
            batches = [token_batch(13, 12, 4, seed) for seed in (0, 1)]
            runs.append(train_on(fp.compose(*parts)(small_gpt()), mesh, batches, engine=engine, donate=True).run)
    for run in runs[1:]:
        same_bits(run, runs[0])
