"""How leaves are cut in slices: pure data."""

from __future__ import annotations

import functools
from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_par as fp
from functional_par import Mesh
from functional_par.accumulate import pieces, shards
from functional_par.buckets import buckets, cut_axes, frozen_buckets, slices
from functional_par.initial import blocks
from functional_par.zero.parts import Part

from ..toys import odd, small_gpt

TIE = fp.tie("head.weight", "embed.weight")
MODELS = {"gpt": (small_gpt, (TIE, fp.shard_tp("REDUCE_SCATTER"))), "odd": (lambda: odd(False), (fp.shard_tp(),))}
MESHES = [Mesh(dp=2), Mesh(dp=3, tp=2), Mesh(ep=2, pp=2, dp=2), Mesh(pp=3), Mesh()]


@functools.cache
def plan_of(name, mesh, zero, bucket_mb=1e-3):
    model, others = MODELS[name]
    return fp.compose(*others, fp.stage_pp(), fp.dp_reduce(zero=zero, bucket_mb=bucket_mb))(model()).plan(mesh)


every_plan = pytest.mark.parametrize(
    "plan", [pytest.param((n, m, z), id=f"{n}-{m}-{z}") for n in MODELS for m in MESHES for z in (1, 2, 3)]
)


@every_plan
def test_along_the_data_axes_each_element_of_a_shard_is_in_one_slice(plan):
    plan = plan_of(*plan)
    owned = [slices(plan, rank) for rank in range(plan.mesh.size)]
    for path, spec in plan.specs.items():
        cut = cut_axes(plan, spec)
        want = () if plan.replicas == 1 or not (spec.trainable or plan.zero == 3) else plan.data_axes
        assert cut == tuple(axis for axis in want if plan.mesh.sizes[axis] > 1)
        for ranks in plan.mesh.groups(*cut) if cut else ():
            if plan.mesh.coords(ranks[0]).pp in spec.owners:
                mine = [owned[rank][path] for rank in ranks]
                taken = Counter(i for piece in mine for i in range(piece.start, piece.stop))
                assert taken == Counter(range(prod(spec.local_shape(plan.mesh))))
                assert all(piece.axes == cut for piece in mine)
        assert cut or not any(path in own for own in owned)


@every_plan
def test_copies_along_other_axes_are_cut_alike(plan):
    """So that sums over owners of a tie and over tp commute with the cut."""
    plan = plan_of(*plan)
    owned = [slices(plan, rank) for rank in range(plan.mesh.size)]
    for rank, coords in enumerate(plan.mesh):
        first = plan.mesh.rank(ep=coords.ep, dp=coords.dp)
        for path, piece in owned[rank].items():
            if 0 in plan.specs[path].owners:
                assert piece == owned[first][path]


@every_plan
def test_a_bucket_and_its_parts_are_one_memory(plan):
    plan = plan_of(*plan)
    for bucket in (*buckets(plan, 0), *frozen_buckets(plan, 0)):
        if not bucket.sliced:
            continue
        whole = torch.arange(bucket.elements)
        leaves = shards(bucket, whole)
        for index in range(bucket.parts):
            part = whole[index * bucket.part : (index + 1) * bucket.part]
            own = pieces(bucket, index, part)
            here = Part(bucket, index)
            assert all(torch.equal(x, own[path]) for path, x in here.cut(leaves).items())
            assert here.joined(own).data_ptr() == part.data_ptr() or not any(x.numel() for x in own.values())
            apart = here.joined({path: x.clone() for path, x in own.items()})
            assert all(torch.equal(x, own[path]) for path, x in here.views(apart).items())
        for rest in bucket.rest:
            inside = [path for path, _, start in bucket.places() if rest.start <= start < rest.stop]
            owed = [path for path in bucket.paths if {*rest.axes} <= {*plan.specs[path].pending}]
            assert sorted(inside) == sorted(owed)


def test_from_gradients_on_each_set_of_readers_has_a_bucket_of_its_own():
    plan = plan_of("gpt", Mesh(dp=3, tp=2), 2, 48.0)
    found = [bucket.paths for bucket in buckets(plan, 0)]
    assert len(found) == 5  # the tie, the rest of embed, two blocks, the last norm with what else is in head
    readers = {
        path: frozenset(layer.name for layer in plan.model.all_layers if path in layer.paths) for path in plan.specs
    }
    assert all(len({readers[path] for path in paths}) == 1 for paths in found)
    assert len({readers[paths[0]] for paths in found}) == 5


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_range_of_elements_is_some_blocks_in_order(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    whole = torch.arange(total).view(shape)
    found = []
    for first, size in blocks(tuple(shape), start, stop):
        block = whole[tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))]
        assert block.shape == size
        found += block.flatten().tolist()
    assert found == list(range(start, stop))
    assert len(list(blocks(tuple(shape), start, stop))) <= max(1, 2 * len(shape) - 1)
