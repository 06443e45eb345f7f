"""One rank's part of a schedule, with everything static worked out once for microbatches of one shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from functional_par.comm.base import World
from functional_par.pipeline.messages import Task
from functional_par.pipeline.routes import Routes, routes
from functional_par.pipeline.stage import Call, Edge, loss_edge, stage_calls
from functional_par.pipeline.verify import verify
from functional_par.plan import Fields, Plan
from functional_par.trace import Abstract, Trace


@dataclass(frozen=True)
class Chunk:
    """One of a rank's stages: its layers, and what goes in and comes out."""

    calls: tuple[Call, ...]

    @property
    def before(self) -> Edge:
        return self.calls[0].before

    @property
    def after(self) -> Edge:
        return self.calls[-1].after


class Carried(NamedTuple):
    """One leaf of a message: an activation, or its cotangent.

    Attributes:
        output: its place among the outputs of the stage that made the activation.
        input: its place among the inputs of the stage that reads it.
        leaf: its shape and dtype.
    """

    output: int
    input: int
    leaf: Abstract


@dataclass(frozen=True)
class Part:
    """What a rank runs in every step with microbatches of one shape.

    Attributes:
        tasks: its actions with their communication.
        chunks: its stages.
        routes: where the leaves between stages come from.
        target: pp coordinate to world rank.
        edges: the values that leave each stage of the pipeline, those of other ranks included.
        carried: (producer, consumer) to the leaves of a message between these stages, in order.
    """

    tasks: tuple[Task, ...]
    chunks: Mapping[int, Chunk]
    routes: Routes
    target: tuple[int, ...]
    edges: tuple[Edge, ...]
    carried: Mapping[tuple[int, int], tuple[Carried, ...]]

    @property
    def order(self) -> Iterator[str]:
        """The layers that need their parameters, in the order in which they run. Weight gradients are computed without them."""
        for task in self.tasks:
            calls = [call.layer.name for call in self.chunks[task.action.stage].calls]
            if task.action.kind != "W":
                yield from calls if task.action.kind == "F" else reversed(calls)

    @property
    def last(self) -> int:
        """The last stage, which has the loss."""
        return len(self.edges) - 1


def make_part(plan: Plan, world: World, shapes: Fields, dtype: torch.dtype, *, training: bool = True) -> Part:
    """The part of this rank, for microbatches of these shapes; forwards alone unless ``training``.

    Raises:
        ScheduleError: the schedule cannot run with the connections that the model has between stages.
        ModelError: for microbatches of this shape and dtype gradients owe something else than the plan says.
    """
    traced, coords = plan.trace(shapes, dtype), world.coords
    found = routes(plan, traced)
    schedule = plan.timetable if training else plan.timetable.forward_only
    edges = tuple(leaving(plan, traced, stage) for stage in range(len(plan.stages)))
    proof = verify(schedule, edges=found.edges, microbatches=plan.microbatches, training=training)
    return Part(
        tuple(task for rank, task in proof.order if rank == coords.pp),  # what runs is what was proved
        {stage: Chunk(stage_calls(plan, traced, stage)) for stage in plan.stages_on(coords.pp)},
        found,
        tuple(world.mesh.rank(**{**coords._asdict(), "pp": pp}) for pp in range(world.mesh.pp)),
        edges,
        {pair: leaves for first, then in found.edges for pair, leaves in carried(found, edges[first], first, then)},
    )


def carried(found: Routes, edge: Edge, first: int, then: int) -> Iterator[tuple[tuple[int, int], tuple[Carried, ...]]]:
    """What goes from one stage to a later one, and what comes back: the cotangents of what has one."""
    leaves = tuple(Carried(output, place, edge.leaves[output]) for output, place in found.between(first, then))
    yield (first, then), leaves
    yield (then, first), tuple(each for each in leaves if edge.differentiable[each.output])


def lanes(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Pairs of pp coordinates (source, target) between which messages go, in one order for all ranks."""
    edges = routes(plan, plan.trace()).edges
    pairs = {(plan.placement[a], plan.placement[b]) for a, b in edges}
    return tuple(sorted({lane for a, b in pairs if a != b for lane in ((a, b), (b, a))}))


def leaving(plan: Plan, traced: Trace, stage: int) -> Edge:
    """The value that leaves a stage."""
    if stage == len(plan.stages) - 1:
        return loss_edge(traced)
    return Edge.of(traced.layers[plan.stages[stage][-1]].output)
