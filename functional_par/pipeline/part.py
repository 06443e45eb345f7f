"""One rank's part of a schedule, with everything static worked out once for microbatches of one shape."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from functional_par.comm.base import AllGather, World
from functional_par.comm.checks import named
from functional_par.errors import MismatchError
from functional_par.pipeline.messages import Message, Task, tasks
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


@dataclass(frozen=True)
class Part:
    """What a rank runs in every step with microbatches of one shape.

    Attributes:
        tasks: its actions with their communication.
        chunks: its stages.
        routes: where the leaves between stages come from.
        target: pp coordinate to world rank.
        edges: the values that leave each stage of the pipeline, those of other ranks included.
    """

    tasks: tuple[Task, ...]
    chunks: Mapping[int, Chunk]
    routes: Routes
    target: tuple[int, ...]
    edges: tuple[Edge, ...]

    @property
    def last(self) -> int:
        """The last stage, which has the loss."""
        return len(self.edges) - 1

    def carried(self, message: Message) -> list[Abstract]:
        """The leaves of a message, in order."""
        return [self.edges[producer].leaves[place] for producer, place, _ in self.places(message)]

    def places(self, message: Message) -> list[tuple[int, int, int]]:
        """(stage that made the leaf, place among its outputs, place among the inputs of the stage that reads it) of the leaves
        of a message: activations, or the cotangents of those that have one."""
        first, then = sorted((message.producer, message.consumer))
        pairs = self.routes.between(first, then)
        if not message.forward:
            pairs = tuple(pair for pair in pairs if self.edges[first].differentiable[pair[0]])
        return [(first, output, place) for output, place in pairs]


def make_part(plan: Plan, world: World, shapes: Fields, dtype: torch.dtype, *, training: bool = True) -> Part:
    """The part of this rank, for microbatches of these shapes; forwards alone unless ``training``.

    Raises:
        ScheduleError: the schedule cannot run with the connections that the model has between stages.
        ModelError: for microbatches of this shape and dtype gradients owe something else than the plan says.
    """
    traced, coords = plan.trace(shapes, dtype), world.coords
    found = routes(plan, traced)
    schedule = plan.timetable if training else plan.timetable.forward_only
    verify(schedule, edges=found.edges, microbatches=plan.microbatches, training=training)
    return Part(
        tasks(schedule, found.edges)[coords.pp],
        {stage: Chunk(stage_calls(plan, traced, stage)) for stage in plan.stages_on(coords.pp)},
        found,
        tuple(world.mesh.rank(**{**coords._asdict(), "pp": pp}) for pp in range(world.mesh.pp)),
        tuple(_leaving(plan, traced, stage) for stage in range(len(plan.stages))),
    )


def lanes(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Pairs of pp coordinates (source, target) between which messages go, in one order for all ranks."""
    edges = routes(plan, plan.trace()).edges
    pairs = {(plan.placement[a], plan.placement[b]) for a, b in edges}
    return tuple(sorted({lane for a, b in pairs if a != b for lane in ((a, b), (b, a))}))


def check_agreement(part: Part, world: World) -> None:
    """MismatchError unless all ranks of this pipeline will send and expect tensors of the same shapes. Collective over pp."""
    group = world.group("pp")
    if group.size == 1:
        return
    shown = "; ".join(
        f"stage {stage}: "
        + ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in edge.leaves)
        for stage, edge in enumerate(part.edges)
    )
    code = torch.tensor([zlib.crc32(shown.encode())], dtype=torch.int64, device=world.device)
    with world.record.during("agreement"):
        codes = group.start(AllGather(0), code).wait().tolist()
    if others := [rank for rank, other in zip(group.ranks, codes, strict=True) if other != codes[group.index]]:
        raise MismatchError(
            f"rank {world.rank} has other shapes between stages than {named(others)} of its pipeline: {shown}. Shapes are "
            "static: give every rank the same global batch."
        )


def _leaving(plan: Plan, traced: Trace, stage: int) -> Edge:
    if stage == len(plan.stages) - 1:
        return loss_edge(traced)
    return Edge.of(traced.layers[plan.stages[stage][-1]].output)
