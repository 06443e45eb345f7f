"""What a step communicates, by closed formulas: nothing more, and each gradient bucket exactly once."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

import functional_par as fp
from functional_par import Mesh
from functional_par.par import RunPar
from functional_par.reduce import buckets

from .oracle import adamw, token_batch, train_on
from .toys import VOCAB, odd, small_gpt, small_llama

SEQ, ROWS = 4, 24

FORWARD, BACKWARD = "forward", "backward"

# Collectives over tp of one layer for one microbatch: (phase, kind) to number of calls.
#
# ALL_REDUCE. Entering split compute (column) is free forward and one all-reduce of the input gradient backward; leaving
# it (row, embedding) is one all-reduce forward and free backward. A block enters and leaves twice (attention, MLP; q, k
# and v enter together, as do gate and up); the embedding leaves, the head enters; the loss takes a maximum and a sum.
#
# REDUCE_SCATTER. Entering is an all-gather, and backward its transpose; leaving is a reduce-scatter, and backward its
# transpose.
LAYERS = {
    "ALL_REDUCE": {
        "embed": {(FORWARD, "all_reduce"): 1},
        "block": {(FORWARD, "all_reduce"): 2, (BACKWARD, "all_reduce"): 2},
        "head": {(BACKWARD, "all_reduce"): 1},
        "loss": {(FORWARD, "all_reduce"): 2},
    },
    "REDUCE_SCATTER": {
        "embed": {(FORWARD, "reduce_scatter"): 1, (BACKWARD, "all_gather"): 1},
        "block": {
            (FORWARD, "all_gather"): 2,
            (FORWARD, "reduce_scatter"): 2,
            (BACKWARD, "reduce_scatter"): 2,
            (BACKWARD, "all_gather"): 2,
        },
        "head": {(FORWARD, "all_gather"): 1, (BACKWARD, "reduce_scatter"): 1},
        "loss": {(FORWARD, "all_reduce"): 2},
    },
}


def formula(plan, rank, norm=2.0):
    """Calls of one step on one rank: (phase, label, kind) to number."""
    mesh, coords, m = plan.mesh, plan.mesh.coords(rank), plan.microbatches
    calls = Counter()
    if mesh.tp > 1:
        for layer in plan.stage_layers(coords.pp):
            for (phase, kind), n in LAYERS[plan.mode.value][layer.name.rstrip("0123456789")].items():
                calls[phase, "tp", kind] += n * m
    if coords.pp > 0:
        calls[FORWARD, "pp", "recv"] += m
        calls[BACKWARD, "pp", "send"] += m
    if coords.pp < mesh.pp - 1:
        calls[FORWARD, "pp", "send"] += m
        calls[BACKWARD, "pp", "recv"] += m
    if plan.replicas > 1:
        calls["count", "ep+dp", "all_reduce"] += 1
    for bucket in buckets(plan, rank):
        if len(bucket.ranks) > 1:
            calls["gradients", bucket.label, "all_reduce"] += 1
    if mesh.size > 1:
        calls["metrics", "ep+pp+dp+cp+tp", "all_reduce"] += 2 if math.isinf(norm) else 1
    return calls


def transforms(mode, async_comm, microbatches, schedule="1f1b"):
    tie = fp.tie("head.weight", "embed.weight")
    return tie, fp.shard_tp(mode, async_comm), fp.stage_pp(schedule, microbatches), fp.dp_reduce()


MODELS = {"gpt": lambda: small_gpt(13, 2, SEQ), "llama": lambda: small_llama(13, 2, SEQ, kv_heads=1)}


@pytest.mark.parametrize(
    ("model", "mesh", "mode", "async_comm", "microbatches", "engine"),
    [
        ("gpt", Mesh(), "ALL_REDUCE", False, 2, "func"),
        ("gpt", Mesh(tp=2), "ALL_REDUCE", False, 1, "func"),
        ("llama", Mesh(tp=4), "ALL_REDUCE", True, 2, "tape"),
        ("gpt", Mesh(tp=2), "REDUCE_SCATTER", True, 2, "func"),
        ("llama", Mesh(tp=4), "REDUCE_SCATTER", False, 1, "tape"),
        ("gpt", Mesh(pp=3), "ALL_REDUCE", False, 4, "func"),
        ("gpt", Mesh(dp=2, pp=2, tp=2), "REDUCE_SCATTER", True, 3, "func"),
        ("llama", Mesh(ep=2, pp=4), "ALL_REDUCE", True, 2, "tape"),
        ("llama", Mesh(dp=2, pp=2, tp=2), "ALL_REDUCE", True, 1, "func"),
    ],
    ids=str,
)
def test_the_calls_of_a_step_are_those_of_the_formula_on_every_rank(
    model, mesh, mode, async_comm, microbatches, engine
):
    program = fp.compose(*transforms(mode, async_comm, microbatches))(MODELS[model]())
    records = train_on(program, mesh, [token_batch(13, ROWS, SEQ)], engine=engine).records
    for rank, record in enumerate(records):
        assert record.calls == formula(program.plan(mesh), rank), rank


def test_the_largest_entry_norm_takes_one_call_more():
    program, mesh = fp.compose(*transforms("ALL_REDUCE", False, 1))(MODELS["gpt"]()), Mesh(dp=2)
    records = train_on(program, mesh, [token_batch(13, ROWS, SEQ)], norm=math.inf, clip=1.0).records
    assert [record.calls for record in records] == [formula(program.plan(mesh), rank, math.inf) for rank in range(2)]


@pytest.mark.parametrize("schedule", ["1f1b", "afab"])
def test_each_bucket_is_reduced_once_a_step_however_many_microbatches(schedule):
    mesh = Mesh(dp=2, pp=2, tp=2)
    program = fp.compose(*transforms("REDUCE_SCATTER", True, 6, schedule))(MODELS["gpt"]())
    plan = program.plan(mesh)
    for rank, record in enumerate(train_on(program, mesh, [token_batch(13, ROWS, SEQ)]).records):
        owed = {bucket.label: bucket.elements(plan) for bucket in buckets(plan, rank) if len(bucket.ranks) > 1}
        assert set(owed) == {"dp", "dp+tp", "pp+dp"}
        found = {key: n for key, n in record.calls.items() if key[0] == "gradients"}
        assert found == {("gradients", label, "all_reduce"): 1 for label in owed}
        sizes = {label: n for (phase, label, _), n in record.nbytes.items() if phase == "gradients"}
        assert sizes == {label: 8 * n for label, n in owed.items()}


def test_a_column_linear_forward_makes_no_call_in_all_reduce():
    x, w = torch.ones(1, 2, 4), torch.ones(3, 4)

    def main(world):
        par = RunPar({("tp",): world.group("tp")})
        fp.nn.column_linear(x, w, par)
        before = dict(world.record.calls)
        fp.nn.row_linear(torch.ones(1, 2, 3), torch.ones(4, 3), par)
        return before, dict(world.record.calls)

    assert fp.run(main, Mesh(tp=2)) == [({}, {("", "tp", "all_reduce"): 1})] * 2


def test_messages_between_stages_are_one_a_tensor_forward_and_one_a_differentiable_tensor_backward():
    program = fp.compose(fp.stage_pp(microbatches=3, split=[1, 1, 1, 1, 1]))(odd())
    records = train_on(program, Mesh(pp=5), [token_batch(VOCAB, ROWS, SEQ)]).records
    # x, skip, kept, ids, aux | the same | the same | x, shift, aux | y, shift, aux
    tensors, differentiable = [5, 5, 5, 3], [3, 3, 3, 2]
    for stage, record in enumerate(records):
        calls = record.calls
        after = stage < 4 and (tensors[stage], differentiable[stage])
        before = stage > 0 and (tensors[stage - 1], differentiable[stage - 1])
        assert calls[FORWARD, "pp", "send"] == (3 * after[0] if after else 0)
        assert calls[BACKWARD, "pp", "recv"] == (3 * after[1] if after else 0)
        assert calls[FORWARD, "pp", "recv"] == (3 * before[0] if before else 0)
        assert calls[BACKWARD, "pp", "send"] == (3 * before[1] if before else 0)


def test_making_a_step_and_its_state_communicates_nothing():
    program = fp.compose(*transforms("REDUCE_SCATTER", True, 2))(MODELS["gpt"]())

    def main(world):
        program.step(world, adamw()).init(0)
        return dict(world.record.calls)

    assert fp.run(main, Mesh(dp=2, pp=2, tp=2)) == [{}] * 8


def test_bytes_of_the_stream_do_not_depend_on_the_tp_mode():
    """An all-reduce carries what a reduce-scatter and an all-gather carry together: the payloads of the local inputs are
    a whole, and a whole and a chunk."""
    mesh, batch = Mesh(tp=2), token_batch(13, ROWS, SEQ)
    whole = ROWS * SEQ * 8 * 8  # rows, seq, embed, bytes
    sizes = {}
    for mode in LAYERS:
        program = fp.compose(*transforms(mode, False, 1))(MODELS["gpt"]())
        record = train_on(program, mesh, [batch]).records[0]
        sizes[mode] = {kind: n for (phase, _, kind), n in record.nbytes.items() if phase == BACKWARD}
    assert sizes["ALL_REDUCE"] == {"all_reduce": 5 * whole}
    assert sizes["REDUCE_SCATTER"] == {"reduce_scatter": 5 * whole, "all_gather": 5 * whole // 2}
