"""What the layers of one rank and the messages between its stages communicate in a step, from the plan and the trace alone."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch.utils import _pytree as pytree

from functional_par.comm.traffic import Call
from functional_par.pipeline.part import carried, leaving
from functional_par.pipeline.products import NONE
from functional_par.pipeline.routes import routes
from functional_par.plan import Plan
from functional_par.trace import Abstract, LayerTrace, Trace
from functional_par.trace.values import Collective

FORWARD, BACKWARD = "forward", "backward"


def layer_calls(plan: Plan, traced: Trace, rank: int) -> Iterator[Call]:
    """The collectives of the layers that a rank runs, for all microbatches. What runs again in backward calls again."""
    for layer in plan.layers_on(plan.mesh.coords(rank).pp):
        entry = traced.layers[layer.name]
        again = entry.forward if _runs_again(plan, layer.name, entry) else ()
        for phase, collectives in ((FORWARD, entry.forward), (BACKWARD, (*again, *entry.backward))):
            for each in collectives:
                yield from _call(plan, rank, phase, each)


def _runs_again(plan: Plan, layer: str, entry: LayerTrace) -> bool:
    leaves = pytree.tree_leaves(entry.output)
    differentiable = any(isinstance(leaf, Abstract) and leaf.value.grad for leaf in leaves)
    return differentiable and plan.remat.get(layer, NONE) != NONE


def _call(plan: Plan, rank: int, phase: str, each: Collective) -> Iterator[Call]:
    coords, ranks, index = plan.mesh.coords(rank), 1, 0
    for axis in each.axes:
        size = getattr(plan.mesh, axis)
        ranks, index = ranks * size, index * size + getattr(coords, axis)
    return Call.of(phase, "+".join(each.axes), each.op, each.nbytes, ranks, index=index, times=plan.microbatches)


def message_calls(plan: Plan, traced: Trace, rank: int) -> Iterator[Call]:
    """The messages that a rank sends and receives: activations from the stage that makes them to each that reads them, and
    the cotangents of those that have one back. Stages of one rank hand over without a message."""
    found, here = routes(plan, traced), plan.mesh.coords(rank).pp
    for first, then in found.edges:
        source, target = plan.placement[first], plan.placement[then]
        if source == target or here not in (source, target):
            continue
        leaves = dict(carried(found, leaving(plan, traced, first), first, then))
        ways = (FORWARD, leaves[first, then], here == source), (BACKWARD, leaves[then, first], here == target)
        for phase, going, sends in ways:
            for each in going:
                n = _nbytes(each.leaf)
                yield Call(phase, "pp", "send" if sends else "recv", n, n if sends else 0, plan.microbatches)


def _nbytes(leaf: Abstract) -> int:
    return prod(leaf.shape) * leaf.dtype.itemsize
