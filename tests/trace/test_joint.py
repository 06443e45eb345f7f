"""The joint function against what is known: derivatives of collectives by hand, and programs that equal the plain function."""

import pytest
import torch

import functional_par as fp
from tests.trace.harness import FIELDS, batch_of, far, model_of, param, reference
from tests.trace.joint import arranged, joint
from tests.trace.programs import RIGHT

NEEDS_FUNC = {
    "maps_over_rows",
    "maps_a_split_over_rows",
    "differentiates_an_energy",
    "differentiates_twice",
    "pulls_back_inside",
}
"""torch.func wraps the tensors of a thread in levels of its own, which other threads cannot read."""

PLAIN = sorted(set(RIGHT) - NEEDS_FUNC)

R2, R4 = torch.tensor([1.0, 2.0]).double(), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
Z1 = torch.zeros(1).double()

KNOWN = {  # the call; the gradient of the whole leaf where rank r weighs its result by (r + 1) * [1, 2, 3, ...]
    "psum": (lambda par, x: par.psum(x, "tp"), torch.cat([3 * R4, 3 * R4])),
    "pmax": (lambda par, x: par.pmax(x, "tp"), torch.zeros(8).double()),
    "all_gather": (lambda par, x: par.all_gather(x, "tp", 0), 3 * torch.arange(1, 9).double()),
    "gather_to_replicated": (
        lambda par, x: par.all_gather(x, "tp", 0, to="replicated"),
        3 * torch.arange(1, 9).double(),
    ),
    "reduce_scatter": (lambda par, x: par.reduce_scatter(x, "tp", 0), torch.cat([R2, 2 * R2, R2, 2 * R2])),
    "ppermute": (lambda par, x: par.ppermute(x, "tp", (1, 0)), torch.cat([2 * R4, R4])),
    "all_to_all": (
        lambda par, x: par.all_to_all(x, "tp", 0, 0),
        torch.cat([R4[:2], 2 * R4[:2], R4[2:], 2 * R4[2:]]),
    ),
    "pvary": (lambda par, x: par.pvary(x, "tp"), 3 * R4),
    "slice": (lambda par, x: par.slice(x, "tp", 0), torch.cat([R2, 2 * R2])),
    "take": (
        lambda par, x: par.take(x, "tp", 0, (0, 1), 3),
        torch.cat([R4[:3], Z1]) + 2 * torch.cat([Z1, R4[:3]]),
    ),
}

WHOLE = {"pvary", "slice", "take"}


@pytest.mark.parametrize("name", KNOWN)
def test_the_derivative_of_a_collective_is_the_one_by_hand(name):
    call, expected = KNOWN[name]

    def loss(p, x, par):
        y = call(par, p["w"])
        mine = (y * torch.arange(1, len(y) + 1) * (par.axis_index("tp") + 1)).sum()
        return par.psum(mine, "tp"), len(par.batch["x"])

    leaf = param(len(expected), dims="embed" if name in WHOLE else "ffn")
    model = fp.Model({"w": leaf}, [("layer", "w", lambda p, x, par: x)], (["w"], loss), FIELDS)
    mesh = fp.Mesh(tp=2)
    found = joint(arranged(model, mesh, [fp.shard_tp()]), batch_of(model, rows=1))
    torch.testing.assert_close(found.grads["w"], expected, rtol=0, atol=1e-12)


def difference(model, mesh):
    """How far the joint function is from the plain one: the loss, and the gradient that is farthest."""
    batch = batch_of(model, rows=2 * mesh.dp)
    found = joint(arranged(model, mesh, [fp.shard_tp(), fp.dp_reduce()]), batch)
    loss, grads = reference(model, batch)
    return far(found.loss, loss), max(far(found.grads[path], grad) for path, grad in grads.items())


@pytest.mark.parametrize("name", PLAIN)
def test_the_joint_function_of_a_correct_program_is_the_plain_function(name):
    params, fn = RIGHT[name]
    assert max(difference(model_of(fn, params), fp.Mesh(tp=2))) <= 1e-10


@pytest.mark.parametrize("name", ["contrasts_each_row_with_all_rows", "routes", "sums_over_padding"])
def test_the_joint_function_adds_up_the_losses_of_replicas(name):
    params, fn = RIGHT[name]
    assert max(difference(model_of(fn, params), fp.Mesh(dp=2, tp=2))) <= 1e-10


def test_a_sum_of_copies_is_as_many_times_too_large_in_the_joint_function():
    def fn(p, x, par):
        return par.psum(x * p["g"], "tp") * 0.5

    model = model_of(fn, {"g": param(6)})
    batch = batch_of(model, rows=1)
    found = joint(arranged(model, fp.Mesh(tp=2), [fp.shard_tp()]), batch)
    once = model_of(lambda p, x, par: x * p["g"], {"g": param(6)})
    loss, grads = reference(once, batch)
    assert far(found.loss, loss) <= 1e-10
    assert max(far(found.grads[path], grad) for path, grad in grads.items()) <= 1e-10
    assert [(call.name, call.same) for call in found.calls] == [("psum", {"tp"})]


def test_a_failure_of_one_rank_is_raised_and_the_others_end():
    def fn(p, x, par):
        if par.rank == 1:
            raise ValueError("rank 1 fails")
        return par.psum(x, "tp")

    model = model_of(fn, {})
    with pytest.raises(ValueError, match="rank 1 fails"):
        joint(arranged(model, fp.Mesh(tp=2), [fp.shard_tp()]), batch_of(model, rows=1))


def test_ranks_that_meet_in_different_collectives_are_an_error():
    def fn(p, x, par):
        return par.psum(x, "tp") if par.rank else par.pmax(x, "tp")

    model = model_of(fn, {})
    with pytest.raises(RuntimeError, match="different collectives"):
        joint(arranged(model, fp.Mesh(tp=2), [fp.shard_tp()]), batch_of(model, rows=1))
