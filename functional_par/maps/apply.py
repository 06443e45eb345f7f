"""Runs the maps of a plan on real gradients and updates, leaf by leaf in sorted order: the same order on every rank."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_par.comm.base import World
from functional_par.maps.leaf import RunLeaf
from functional_par.plan import Plan
from functional_par.random import Key
from functional_par.shards import without_padding


@dataclass(frozen=True)
class Moment:
    """When a map runs: the parameters before the update, the number of steps done and the key of the step."""

    params: Mapping[str, Tensor]
    step: int
    key: Key


@torch.no_grad()
def apply(plan: Plan, phase: str, world: World, moment: Moment, values: MutableMapping[str, Tensor]) -> None:
    """Replace each value, a gradient or an update by path, by what the maps of this phase make of it. The padding of an uneven
    shard they do not see.

    Where ``values`` are views of a buffer they stay such views.
    """
    maps = [each for each in plan.maps if each.phase == phase]
    for path in sorted(values) if maps else ():
        spec = plan.specs[path]
        value, param = (without_padding(spec, plan.mesh, world.coords, x) for x in (values[path], moment.params[path]))
        param = param.to(value.dtype)
        for at, each in enumerate(maps):
            if each.acts_on(path):
                later = ("", *(other.name for other in maps[at:]))
                owes = tuple(debt.axis for debt in spec.owes if debt.payer in later) if phase == "local" else ()
                key = moment.key.fold(each.name).fold(path)
                leaf = RunLeaf(world, spec, owes, param, moment.step, key, value.dtype)
                # A copy: the result may be a view of what is written to.
                value.copy_(each.function(value.clone(memory_format=torch.contiguous_format), leaf))
