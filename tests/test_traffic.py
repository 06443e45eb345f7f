"""What a step communicates is what the closed formulas say, call by call and byte by byte on every rank, in every layout; and
the formulas are the known minimum, written out by hand for the llama."""

from __future__ import annotations

import collections
import dataclasses
import math
import time

import pytest
import torch

import functional_par as fp
from functional_par import Mesh
from functional_par.comm.traffic import measured
from functional_par.traffic import step_traffic

from .oracle import token_batch, train_on
from .toys import odd, small_gpt, small_llama
from .trace.harness import EMBED, batch_of, column, model_of, param

ROWS, SEQ, VOCAB = 12, 4, 13
TIE = fp.tie("head.weight", "embed.weight")
NARROW = fp.precision("float64", reduce="bf16")


def composed(*transforms, mode="ALL_REDUCE", async_comm=False, schedule="1f1b", microbatches=2, zero=0, **pp):
    """All transforms, as they are composed most."""
    return (
        *transforms,
        fp.shard_tp(mode, async_comm),
        fp.stage_pp(schedule, microbatches, **pp),
        fp.dp_reduce(zero=zero, bucket_mb=0.002),
    )


def kinds(*names, **options):
    return {name: composed(schedule=name, **options) for name in names}


RS = "REDUCE_SCATTER"
MODES = ("ALL_REDUCE", RS)
FAMILIES = {
    "tp2": (Mesh(tp=2), {f"{mode} {a}": composed(mode=mode, async_comm=a) for mode in MODES for a in (False, True)}),
    "tp4, kv heads whole": (Mesh(tp=4), {mode: composed(mode=mode, async_comm=True) for mode in MODES}),
    "pp2": (Mesh(pp=2), kinds("afab", "1f1b", "interleaved", "zb-h1", "zb-2p", "zbv", "dualpipev", microbatches=4)),
    "pp4": (Mesh(pp=4), {"tie": composed(TIE, microbatches=1)}),
    "dp2": (Mesh(dp=2), {f"zero {z}": composed(zero=z) for z in range(4)}),
    "ep2 x dp2": (Mesh(ep=2, dp=2), {"zero 3": composed(zero=3, microbatches=1)}),
    "tp2 x pp2": (Mesh(tp=2, pp=2), {mode: composed(TIE, mode=mode, async_comm=True) for mode in MODES}),
    "dp2 x tp2": (Mesh(dp=2, tp=2), {f"{m} {z}": composed(mode=m, zero=z) for m, z in (("ALL_REDUCE", 0), (RS, 1), (RS, 3))}),
    "dp2 x pp2": (Mesh(dp=2, pp=2), {"zero 2": composed(TIE, zero=2), "zbv, zero 3": composed(schedule="zbv", zero=3)}),
    "2x2x2": (Mesh(dp=2, pp=2, tp=2), {"gpt": composed(TIE, mode=RS, async_comm=True, microbatches=3)}),
    "reduce in bfloat16": (Mesh(dp=2, pp=2), {f"zero {z}": composed(TIE, NARROW, zero=z) for z in (0, 1, 3)}),
    "remat": (Mesh(tp=2, dp=2), {p: composed(fp.remat(p), mode=RS, zero=3) for p in ("full", "selective")}),
}  # fmt: skip


def check(program, mesh, batch, dtype=torch.float64, norm=2.0, **options):
    """The formula is what each rank records in a step."""
    plan = program.plan(mesh)
    fields = {
        name: ((len(x) // plan.pieces, *x.shape[1:]), dtype if x.is_floating_point() else x.dtype)
        for name, x in batch.items()
    }
    ranks = train_on(program, mesh, [batch], dtype=dtype, norm=norm, **options)
    for rank, record in enumerate(ranks.records):
        expected, found = step_traffic(plan, rank, fields, dtype, norm), measured(record)
        assert found.flows == expected.flows, rank
        assert found.sent == expected.sent == sum(record.sent.values()) - agreed(record)
    return plan, ranks


def agreed(record):
    return sum(n for (phase, _, _), n in record.sent.items() if phase == "agreement")


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_step_sends_just_what_the_formula_says(family):
    mesh, layouts = FAMILIES[family]
    for i, transforms in enumerate(layouts.values()):
        model = small_llama(VOCAB, 2, SEQ, kv_heads=1) if i % 2 == 0 else small_gpt(VOCAB, 2, SEQ)
        program = fp.compose(*transforms)(model)
        kind = torch.float32 if i % 2 and program.plan(mesh).precision is None else torch.float64
        check(program, mesh, token_batch(VOCAB, ROWS, SEQ), kind, math.inf if i % 2 else 2.0)


def busy(p, x, par):
    """Every collective, along one axis and along two, also in a derivative of the layer's own."""
    y = par.ppermute(par.pvary(x, "tp") @ p["w"].T, "tp", (1, 0, 2) if par.size("tp") == 3 else (0,))
    y = par.all_to_all(par.all_to_all(y, "tp", 1, 2).tanh(), "tp", 2, 1)
    y = y * par.all_gather(par.reduce_scatter(y, "tp", 1), "tp", 1) / (1 + par.pmax(y.abs().amax(), "tp", "dp"))
    slope = torch.func.grad(lambda v: par.psum((par.pvary(v, "tp") @ p["w"].T).sin().sum(), "tp"))(x.detach())
    z = par.all_gather(par.slice(x, "tp", 1) * 2, "tp", 1, to="replicated")
    return par.psum(y @ p["w"], "tp") + slope + z


def test_every_collective_of_a_layer_is_foreseen_forward_and_backward():
    model = model_of(busy, {"w": column()}, after=[("again", "body", busy)])
    batch = batch_of(model, rows=8)
    for extra in ([], [fp.remat("full", ["body"])]):
        program = fp.compose(*extra, fp.shard_tp(), fp.dp_reduce(), fp.stage_pp(microbatches=2))(model)
        _, ranks = check(program, Mesh(dp=2, tp=3), batch, engine="tape")
    made = {kind for _, _, kind in ranks.records[0].calls}
    assert made == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"}
    assert ranks.records[2].sent["forward", "tp", "permute"] == 0 < ranks.records[0].sent["forward", "tp", "permute"]


def test_what_two_outputs_have_in_common_comes_back_once():
    def both(p, x, par):
        v = par.pvary(p["g"], "tp") * p["w"]
        return {"x": par.psum(par.pvary(x, "tp") @ v.T @ p["w"], "tp"), "scale": par.psum(v.sum(0), "tp")}

    def join(p, x, par):
        return x["x"] * x["scale"]

    model = model_of(both, {"w": column(), "g": param(EMBED)}, after=[("join", [], join)])
    program = fp.compose(fp.shard_tp(), fp.dp_reduce())(model)
    _, ranks = check(program, Mesh(tp=2), batch_of(model))
    assert ranks.records[0].calls["backward", "tp", "all_reduce"] == 2


def test_messages_that_skip_stages_and_leaves_that_are_frozen_are_foreseen():
    program = fp.compose(fp.stage_pp(microbatches=3, split=[1, 1, 1, 1, 1]))(odd(trainable_scale=False))
    check(program, Mesh(pp=5), token_batch(11, ROWS, SEQ))
    model = small_llama(VOCAB, 1, SEQ)
    table = dataclasses.replace(model.params["embed"]["weight"], trainable=False)
    frozen = dataclasses.replace(model, params={**model.params, "embed": {"weight": table}})
    for zero in (0, 3):
        check(fp.compose(*composed(mode=RS, zero=zero))(frozen), Mesh(dp=2, tp=2), token_batch(VOCAB, ROWS, SEQ))


D, BLOCKS, LONG, BIG = 128, 3, 16, 64
LLAMA = fp.models.llama(BIG, D, BLOCKS, 4, LONG, d_ff=D)


def phases(plan, rank, rows, dtype=torch.float32):
    """Bytes sent by (phase, label)."""
    fields = dict.fromkeys(("tokens", "labels"), ((rows, LONG), torch.int64))
    sent = collections.Counter()
    for (phase, label, _), flow in step_traffic(plan, rank, fields, dtype).flows.items():
        sent[phase, label] += flow.sent
    return sent


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("mode", ["ALL_REDUCE", RS])
def test_tensor_parallel_sends_two_all_reduces_a_block_forward_and_two_backward(mode, tp):
    m, rows = 3, 5
    sent = phases(fp.compose(*composed(mode=mode, microbatches=m))(LLAMA).plan(Mesh(tp=tp)), 0, rows)
    activation, number = 4 * rows * LONG * D, 4 * rows * LONG
    around = 2 * (tp - 1) * activation // tp  # an all-reduce, or a reduce-scatter and an all-gather
    # The embedding leaves the split and the head enters it, each with half of an all-reduce a phase in REDUCE_SCATTER.
    losses = 2 * (tp - 1) * 3 * number // tp  # a maximum, a sum and the logit of the target
    assert sent["forward", "tp"] == m * ((2 * BLOCKS + 1) * around + losses)
    assert sent["backward", "tp"] == m * (2 * BLOCKS + 1) * around


@pytest.mark.parametrize("dp", [2, 8])
def test_data_parallel_sends_the_parameters_once_around_and_zero_3_half_as_much_again(dp):
    sizes = [math.prod(leaf.shape) for leaf in LLAMA.leaves.values()]
    assert not any(size % (16 * dp) for size in sizes)  # nothing is rounded up
    around = 4 * sum(sizes) * (dp - 1) // dp
    for zero, gradients, parameters in ((0, 2, 0), (1, 1, 1), (2, 1, 1), (3, 1, 2)):
        plan = fp.compose(fp.dp_reduce(zero=zero))(LLAMA).plan(Mesh(dp=dp))
        sent = phases(plan, 0, 1)
        assert sent["gradients", "dp"] == gradients * around
        assert sent["parameters", "dp"] == parameters * around - (0 if zero < 3 else last_layers(plan, dp))


def last_layers(plan, dp):
    """Bytes of what the last layer needs: between its forward and its backward it stays."""
    paths = next(layer.paths for layer in reversed(plan.model.layers) if layer.paths)
    return 4 * sum(math.prod(plan.specs[path].shape) for path in paths) * (dp - 1) // dp


@pytest.mark.parametrize("mode", ["ALL_REDUCE", RS])
def test_a_pipeline_sends_an_activation_and_a_cotangent_for_each_microbatch_and_boundary(mode):
    m, rows, tp = 5, 2, 2
    plan = fp.compose(*composed(mode=mode, microbatches=m))(LLAMA).plan(Mesh(pp=3, tp=tp))
    activation = 4 * rows * LONG * D // (tp if mode == RS else 1)
    for pp in range(3):
        sent = phases(plan, plan.mesh.rank(pp=pp, tp=1), rows)
        assert sent["forward", "pp"] == (m * activation if pp < 2 else 0)
        assert sent["backward", "pp"] == (m * activation if pp > 0 else 0)


def test_the_formula_is_cheap_for_a_hundred_thousand_ranks():
    plan = fp.compose(*composed(mode=RS, zero=1))(LLAMA).plan(Mesh(dp=12_500, pp=2, tp=4))
    phases(plan, 0, 1)
    start = time.thread_time()
    first, last = (phases(plan, rank, 1) for rank in (0, 99_999))
    assert time.thread_time() - start < 1.0
    assert first["forward", "pp"] == last["backward", "pp"] > 0
