"""Copying the leaves to every replica, and cutting the batch."""

from __future__ import annotations

import pytest

import functional_par as fp
from functional_par import Mesh

from ..oracle import adamw, token_batch
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


@pytest.mark.parametrize("zero", [4, -1, True, "1", 1.5])
def test_what_ranks_share_out_is_one_of_four(zero):
    with pytest.raises(fp.CompositionError, match=r"it is 0 \(nothing is shared out\), 1 \(the optimizer's state\), 2"):
        fp.dp_reduce(zero=zero)


@pytest.mark.parametrize("own", [fp.on_local_gradients, fp.on_reduced_gradients, fp.on_updates])
def test_maps_of_the_users_own_have_no_whole_gradients_where_ranks_share_them_out(own):
    def twice(grad, leaf):
        return 2 * grad

    message = rf"{own.__name__}\(twice\) acts on whole gradients or updates, but with dp_reduce\(zero=2\) each rank has a slice"
    for parts in [(own(twice), fp.dp_reduce(zero=2)), (fp.dp_reduce(zero=2), own(twice))]:
        with pytest.raises(fp.CompositionError, match=message):
            fp.compose(*parts)(small_gpt())
    fp.compose(own(twice), fp.dp_reduce())(small_gpt())


def test_a_state_of_whole_parameters_is_none_of_slices():
    def main(world):
        whole, cut = (fp.compose(fp.dp_reduce(zero=zero))(small_gpt()).step(world, adamw()) for zero in (0, 3))
        with pytest.raises(fp.StateError, match=r"another program, layout or dtype: embed\.weight is .*\[13, 8\], but"):
            cut(whole.init(0), token_batch(13, 4, 4))

    fp.run(main, Mesh(dp=2))
