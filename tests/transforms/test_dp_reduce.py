"""Copying the leaves to every replica, and cutting the batch."""

from __future__ import annotations

import pytest

import functional_par as fp
from functional_par import Mesh

from ..toys import small_gpt


def test_every_trainable_leaf_that_meets_the_batch_owes_the_data_axes():
    plan = fp.compose(fp.dp_reduce())(small_gpt()).plan(Mesh(ep=2, dp=2))
    for spec in plan.specs.values():
        assert [debt.axis for debt in spec.owes] == ["ep", "dp"]
        assert all(debt.reason for debt in spec.owes)
        assert all(debt.layer and ".py:" in debt.place for debt in spec.owes)


def test_the_batch_is_cut_over_ep_and_dp_in_rank_order():
    plan = fp.compose(fp.dp_reduce(), fp.shard_tp(), fp.stage_pp())(small_gpt()).plan(Mesh(ep=2, pp=2, dp=3, tp=2))
    assert plan.data_axes == ("ep", "dp")
    assert plan.replicas == 6
    for rank, coords in enumerate(plan.mesh):
        assert plan.replica(rank) == coords.ep * 3 + coords.dp


def test_without_it_there_is_one_replica():
    plan = fp.compose(fp.shard_tp())(small_gpt()).plan(Mesh(tp=2))
    assert (plan.data_axes, plan.replicas) == ((), 1)
    assert all(debt.axis != "dp" for spec in plan.specs.values() for debt in spec.owes)


@pytest.mark.parametrize("size", [0, -1.0, True, "48", float("nan")])
def test_a_bucket_has_a_positive_size(size):
    with pytest.raises(fp.CompositionError, match=r"a bucket holds a positive number of MiB, such as 48\."):
        fp.dp_reduce(bucket_mb=size)
