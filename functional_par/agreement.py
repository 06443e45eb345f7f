"""What all ranks have to have in common before they start: their plans, and the shapes of what they send each other. Each
process makes its plan by itself; processes that differ would train another model without a word.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from functional_par.comm.base import AGREEMENT, AllGather, Group, World
from functional_par.comm.checks import named
from functional_par.errors import MismatchError
from functional_par.mesh import AXES
from functional_par.pipeline.part import Part
from functional_par.plan import Plan
from functional_par.precision import Precision


def check_plan(plan: Plan, world: World, precision: Precision) -> None:
    """MismatchError unless all ranks have the same plan. Collective over the world."""
    group = world.group(*AXES)
    parts = _parts(plan, precision)
    for what, ranks in _differences(group, parts, world):
        if ranks:
            shown = parts[what]
            raise MismatchError(
                f"rank {world.rank} has another plan than {named(ranks)}: they differ in {what}, which on this rank is: "
                f"{shown if len(shown) < 300 else shown[:300] + ' ...'}. Every process makes the same program: what may differ "
                "from process to process, such as costs from fp.measure or a random schedule, is made once and shared: saved "
                "to a file, or measured on rank 0 and sent."
            )


def check_shapes(part: Part, world: World) -> None:
    """MismatchError unless all ranks of this pipeline will send and expect tensors of the same shapes. Collective over pp."""
    shown = "; ".join(
        f"stage {stage}: "
        + ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in edge.leaves)
        for stage, edge in enumerate(part.edges)
    )
    for _, ranks in _differences(world.group("pp"), {"shapes": shown}, world):
        if ranks:
            raise MismatchError(
                f"rank {world.rank} has other shapes between stages than {named(ranks)} of its pipeline: {shown}. Shapes are "
                "static: give every rank the same global batch."
            )


def _differences(group: Group, texts: Mapping[str, str], world: World) -> list[tuple[str, list[int]]]:
    """For each text its name and the ranks of the group that have another."""
    if group.size == 1:
        return []
    codes = torch.tensor(
        [[zlib.crc32(text.encode()) for text in texts.values()]], dtype=torch.int64, device=world.device
    )
    with world.record.during(AGREEMENT):
        found = group.start(AllGather(0), codes).wait().tolist()
    own = found[group.index]
    return [
        (name, [rank for rank, row in zip(group.ranks, found, strict=True) if row[i] != own[i]])
        for i, name in enumerate(texts)
    ]


def _parts(plan: Plan, precision: Precision) -> Mapping[str, str]:
    """The parts of a plan in words, which are the same in every process that has made it alike."""
    stages = " | ".join(f"rank {pp}: {' '.join(names)}" for pp, names in zip(plan.placement, plan.stages, strict=True))
    leaves = "; ".join(
        f"{path} {spec} {spec.shape} on {spec.owners}, owes {[(debt.axis, debt.payer) for debt in spec.owes]}"
        + ("" if spec.trainable else ", frozen")
        for path, spec in plan.specs.items()
    )
    rows = "" if plan.given is None else f", {' / '.join(str(plan.given).splitlines())}"
    maps = ", ".join(f"{each.phase} {each.name}" for each in plan.maps)
    return {
        "the mesh": str(plan.mesh),
        "the stages": stages,
        "the schedule": f"{plan.schedule}, {plan.microbatches} microbatches{rows}",
        "the leaves and how they are cut": leaves,
        "the ties": str(dict(plan.aliases)),
        "the modes": f"{plan.mode.value}, async_comm={plan.async_comm}, data over {plan.data_axes}, "
        f"zero={plan.zero}, buckets of {plan.bucket_mb:g} MiB, {precision}",
        "the maps on gradients": maps,
        "what is computed again (remat)": str(dict(plan.remat)),
    }
