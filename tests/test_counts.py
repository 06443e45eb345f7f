"""What a step of the language models communicates, by closed formulas: nothing more, and each gradient bucket exactly once.
tests/properties has the formulas, with the bytes, for a model of its own in every layout."""

from __future__ import annotations

from collections import Counter

import pytest

import functional_par as fp
from functional_par import Mesh
from functional_par.buckets import buckets

from .oracle import token_batch, train_on
from .toys import VOCAB, odd, small_gpt, small_llama

SEQ, ROWS = 4, 24

FORWARD, BACKWARD = "forward", "backward"

# Collectives over tp of one layer for one microbatch: (phase, kind) to number of calls.
#
# ALL_REDUCE. Entering split compute (column) is free forward and one all-reduce of the input gradient backward; leaving
# it (row, embedding) is one all-reduce forward and free backward. A block enters and leaves twice (attention, MLP; q, k
# and v enter together, as do gate and up); the embedding leaves, the head enters, and its losses take a maximum and a sum.
#
# REDUCE_SCATTER. Entering is an all-gather, and backward its transpose; leaving is a reduce-scatter, and backward its
# transpose.
LAYERS = {
    "ALL_REDUCE": {
        "embed": {(FORWARD, "all_reduce"): 1},
        "block": {(FORWARD, "all_reduce"): 2, (BACKWARD, "all_reduce"): 2},
        "head": {(FORWARD, "all_reduce"): 2, (BACKWARD, "all_reduce"): 1},
    },
    "REDUCE_SCATTER": {
        "embed": {(FORWARD, "reduce_scatter"): 1, (BACKWARD, "all_gather"): 1},
        "block": {
            (FORWARD, "all_gather"): 2,
            (FORWARD, "reduce_scatter"): 2,
            (BACKWARD, "reduce_scatter"): 2,
            (BACKWARD, "all_gather"): 2,
        },
        "head": {(FORWARD, "all_gather"): 1, (FORWARD, "all_reduce"): 2, (BACKWARD, "reduce_scatter"): 1},
    },
}


def formula(plan, rank):
    """Calls of one step on one rank: (phase, label, kind) to number."""
    mesh, coords, m = plan.mesh, plan.mesh.coords(rank), plan.microbatches
    calls = Counter()
    if mesh.tp > 1:
        for layer in plan.layers_on(coords.pp):
            for (phase, kind), n in LAYERS[plan.mode.value].get(layer.name.rstrip("0123456789"), {}).items():
                calls[phase, "tp", kind] += n * m
    if coords.pp > 0:
        calls[FORWARD, "pp", "recv"] += m
        calls[BACKWARD, "pp", "send"] += m
    if coords.pp < mesh.pp - 1:
        calls[FORWARD, "pp", "send"] += m
        calls[BACKWARD, "pp", "recv"] += m
    if mesh.size > 1:
        calls["agreement", "ep+pp+dp+cp+tp", "all_gather"] += 1  # once, when the step is built
    if mesh.pp > 1:
        calls["agreement", "pp", "all_gather"] += 1  # once, in the first step
    if plan.replicas > 1:
        calls["count", "ep+dp", "all_reduce"] += 1
    for bucket in buckets(plan, rank):
        if len(bucket.ranks) > 1:
            calls["gradients", bucket.label, "all_reduce"] += 1
    if mesh.size > 1:
        calls["metrics", "ep+pp+dp+cp+tp", "all_reduce"] += 1
    return calls


def transforms(mode, async_comm, microbatches, schedule="1f1b"):
    tie = fp.tie("head.weight", "embed.weight")
    return tie, fp.shard_tp(mode, async_comm), fp.stage_pp(schedule, microbatches), fp.dp_reduce()


MODELS = {"gpt": lambda: small_gpt(13, 2, SEQ), "llama": lambda: small_llama(13, 2, SEQ, kv_heads=1)}


@pytest.mark.parametrize(
    ("model", "mesh", "mode", "async_comm", "microbatches", "engine"),
    [
        ("llama", Mesh(tp=4), "ALL_REDUCE", True, 2, "tape"),
        ("llama", Mesh(tp=4), "REDUCE_SCATTER", False, 1, "tape"),
        ("gpt", Mesh(dp=2, pp=2, tp=2), "REDUCE_SCATTER", True, 3, "func"),
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


def test_messages_between_stages_are_one_a_tensor_forward_and_one_a_differentiable_tensor_backward():
    program = fp.compose(fp.stage_pp(microbatches=3, split=[1, 1, 1, 1, 1]))(odd())
    records = train_on(program, Mesh(pp=5), [token_batch(VOCAB, ROWS, SEQ)]).records
    # From 0: x and kept to 1, skip to 3, aux to 4. From 1 and 2: x to the next. From 3: x and shift to 4. The ids are a field
    # of the batch, which every stage has.
    sent, received = [4, 1, 1, 2, 0], [0, 2, 1, 2, 3]
    back, given = [3, 1, 1, 1, 0], [0, 1, 1, 2, 2]  # without kept and shift
    for stage, record in enumerate(records):
        calls = record.calls
        assert calls[FORWARD, "pp", "send"] == 3 * sent[stage]
        assert calls[FORWARD, "pp", "recv"] == 3 * received[stage]
        assert calls[BACKWARD, "pp", "recv"] == 3 * back[stage]
        assert calls[BACKWARD, "pp", "send"] == 3 * given[stage]
