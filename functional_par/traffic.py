"""What a step communicates, by closed formula: calls and bytes of every kind on one rank, from the plan alone, without ranks.

Each part has its own formula next to what it counts: layers and messages (``pipeline.traffic``), the buckets of gradients
(``buckets``), slices of parameters (``zero``). A test compares all of them with what ranks record, in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from functional_par.buckets import buckets, frozen_buckets, rest_sums
from functional_par.comm.base import AllGather, AllReduce, ReduceScatter
from functional_par.comm.traffic import Call, Traffic, total
from functional_par.mesh import AXES
from functional_par.metrics import HEAD
from functional_par.pipeline.traffic import layer_calls, message_calls
from functional_par.plan import Fields, Plan
from functional_par.zero.traffic import gathers

WIDE = 8
"""Bytes of a count (int64) and of a number in the metrics (float64)."""


def step_traffic(
    plan: Plan,
    rank: int,
    batch: Fields | None = None,
    dtype: torch.dtype | None = None,
    norm: float = 2.0,
) -> Traffic:
    """What one rank communicates in a training step, but for what the user's own maps on gradients exchange.

    It costs a trace of the model, which is kept by the plan, and nothing that grows with the number of ranks but the lists of
    those with which this one communicates.

    Args:
        plan: a finished plan.
        rank: whose traffic.
        batch: shape and dtype of each field of a microbatch; by default a small one.
        dtype: of parameters and activations; by default as ``precision`` says, else float32.
        norm: order of the gradient norm.

    >>> import functional_par as fp
    >>> model = fp.models.llama(vocab=16, d_model=8, n_layers=1, n_heads=2, seq_len=4)
    >>> plan = fp.compose(fp.shard_tp(), fp.dp_reduce())(model).plan(fp.Mesh(dp=2, tp=2))
    >>> for key, flow in step_traffic(plan, rank=0).flows.items():
    ...     print(*key, flow.calls, flow.nbytes, flow.sent)
    forward tp all_reduce 5 432 432
    backward tp all_reduce 3 384 384
    count ep+dp all_reduce 1 8 8
    gradients dp all_reduce 1 2752 2752
    metrics ep+pp+dp+cp+tp all_reduce 1 136 204
    """
    kinds = plan.precise(dtype, "step_traffic")
    traced = plan.trace(batch, kinds.compute)
    return total(
        (
            *layer_calls(plan, traced, rank),
            *message_calls(plan, traced, rank),
            *_count_calls(plan),
            *_gradient_calls(plan, rank, kinds.reduce.itemsize),
            *_metric_calls(plan, norm),
            *_parameter_calls(plan, rank, kinds.compute.itemsize),
        )
    )


def _count_calls(plan: Plan) -> Iterator[Call]:
    yield from Call.of("count", "+".join(plan.data_axes), AllReduce(), WIDE, plan.replicas)


def _metric_calls(plan: Plan, norm: float) -> Iterator[Call]:
    """Of the head, and a number for each leaf that is trained: together, but where the one is a sum and the other a maximum."""
    parts = WIDE * sum(spec.trainable for spec in plan.specs.values())
    pieces = (WIDE * HEAD, parts) if math.isinf(norm) else (WIDE * HEAD + parts,)
    for nbytes in pieces:
        yield from Call.of("metrics", "+".join(AXES), AllReduce(), nbytes, plan.mesh.size)


def _gradient_calls(plan: Plan, rank: int, element: int) -> Iterator[Call]:
    """Each bucket once a step; from ``zero=2`` on once a layer and microbatch that adds to it."""
    own, pp = buckets(plan, rank), plan.mesh.coords(rank).pp
    for bucket in own:
        op = ReduceScatter(0) if bucket.sliced else AllReduce()
        passing = bucket.sliced and plan.zero > 1
        adding = sum(bool({*bucket.paths} & {*layer.paths}) for layer in plan.layers_on(pp))
        times = plan.microbatches * adding if passing else 1
        yield from Call.of("gradients", bucket.label, op, element * bucket.elements, len(bucket.ranks), times=times)
    for rest in rest_sums(plan, rank, own):
        yield from Call.of("gradients", rest.label, AllReduce(), element * rest.elements, len(rest.ranks))


def _parameter_calls(plan: Plan, rank: int, element: int) -> Iterator[Call]:
    """Slices after they have moved, or, with ``zero=3``, for every run of layers that need them."""
    both = (*buckets(plan, rank), *frozen_buckets(plan, rank))
    cut = [bucket for bucket in both if bucket.sliced]
    if plan.zero == 3:
        times: Sequence[int] = gathers(plan, plan.mesh.coords(rank).pp, [bucket.paths for bucket in cut])
    else:
        times = [1] * len(cut)
    for bucket, n in zip(cut, times, strict=True):
        yield from Call.of("parameters", bucket.label, AllGather(0), element * bucket.part, len(bucket.ranks), times=n)
