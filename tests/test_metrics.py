"""Loss and norm of the whole world: every loss and every shard once."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter

import pytest
import torch

import functional_par as fp
from functional_par import CompositionError, Mesh, ModelError
from functional_par.checks import check_options
from functional_par.comm.solo import SoloGroup
from functional_par.metrics import Total, Totals, clip_coefficient

from .toys import odd, small_gpt

MESHES = [Mesh(), Mesh(ep=2, pp=2, dp=2, tp=2), Mesh(pp=4, tp=3), Mesh(dp=4, tp=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_shard_is_counted_by_one_rank_and_a_tied_leaf_once(mesh):
    transforms = [fp.tie("head.weight", "embed.weight"), fp.shard_tp("REDUCE_SCATTER"), fp.stage_pp(), fp.dp_reduce()]
    plan = fp.compose(*transforms)(wide() if mesh.tp == 3 else small_gpt()).plan(mesh)
    counted = Counter()
    for rank, coords in enumerate(mesh):
        for _, path in Totals(plan, rank, 2.0).mine:
            spec = plan.specs[path]
            counted[path, spec.starts(mesh, coords)] += 1
            assert coords.pp in spec.owners
    expected = {(path, spec.starts(mesh, coords)) for path, spec in plan.specs.items() for coords in mesh}
    assert counted == Counter(dict.fromkeys(expected, 1))


def wide():
    return fp.models.gpt(13, 12, 2, 3, 6, d_ff=6)


@pytest.mark.parametrize("mesh", MESHES[:2], ids=str)
def test_the_loss_of_each_replica_is_counted_by_one_rank_of_the_last_stage(mesh):
    plan = fp.compose(fp.shard_tp(), fp.stage_pp(), fp.dp_reduce())(odd()).plan(mesh)
    replicas = [plan.replica(rank) for rank in range(mesh.size) if Totals(plan, rank, 2.0).has_loss]
    assert sorted(replicas) == list(range(plan.replicas))
    assert all(mesh.coords(r).pp == mesh.pp - 1 for r in range(mesh.size) if Totals(plan, r, 2.0).has_loss)


def test_frozen_leaves_are_not_in_the_norm():
    plan = fp.compose()(odd(trainable_scale=False)).plan(Mesh())
    assert "scale" not in Totals(plan, 0, 2.0).paths


@functools.cache
def odd_plan():
    return fp.compose()(odd()).plan(Mesh())


class One:
    """A world of one rank."""

    mesh, device = Mesh(), torch.device("cpu")

    def group(self, *axes):
        return SoloGroup()


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_losses_counts_and_norm_are_summed(norm):
    plan = odd_plan()
    generator = torch.Generator().manual_seed(0)
    grads = {path: torch.randn(spec.shape, generator=generator) for path, spec in plan.specs.items()}
    losses = [(torch.tensor(1.5), torch.tensor(3)), (torch.tensor(2.0), torch.tensor(4))]
    total = Totals(plan, 0, norm).over_world(One(), losses, grads)
    assert (total.loss, total.count) == (3.5, 7)
    whole = torch.cat([g.flatten() for g in grads.values()]).double()
    assert total.norm == pytest.approx(torch.linalg.vector_norm(whole, norm).item(), rel=1e-6)


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("path", ["table", "scale", "temperature"])
def test_one_bad_entry_anywhere_makes_the_norm_not_finite(norm, bad, path):
    plan = odd_plan()
    grads = {p: torch.ones(spec.shape) for p, spec in plan.specs.items()}
    grads[path].view(-1)[-1] = bad
    assert not math.isfinite(Totals(plan, 0, norm).over_world(One(), [], grads).norm)


def test_the_coefficient_never_raises_a_gradient():
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(100.0, None) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)


@pytest.mark.parametrize("norm", [0, 3.0, -1.0, math.nan, "2"])
def test_an_unknown_order_of_the_norm_is_refused(norm):
    with pytest.raises(
        CompositionError, match=re.escape(f"norm={norm!r}: the order of the gradient norm is 1, 2 or inf.")
    ):
        check_options(fp.optim.sgd(lr=1.0), torch.float32, 1.0, norm)


@pytest.mark.parametrize("clip", [0, -1.0, math.nan, "1", True])
def test_a_clip_that_is_not_positive_is_refused(clip):
    message = f"clip={clip!r}: the largest gradient norm is a positive number, or None for no clipping."
    with pytest.raises(CompositionError, match=re.escape(message)):
        check_options(fp.optim.sgd(lr=1.0), torch.float32, clip, 2.0)
    check_options(fp.optim.sgd(lr=1.0), torch.float32, None, math.inf)


def test_a_count_that_differs_from_what_was_counted_is_refused_with_both_and_the_fix():
    Total(1.0, 7.0, 1.0).check_count(7)
    message = (
        "the loss returned a count of 7 over the whole batch, but 8 terms were counted beforehand, by which gradients are "
        "scaled. Pass fp.Model(..., count=...)"
    )
    with pytest.raises(ModelError, match=re.escape(message)):
        Total(1.0, 7.0, 1.0).check_count(8)
