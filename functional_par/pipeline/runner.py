"""Runs this rank's part of the plan's schedule, step after step: what is static is kept, and so is the memory that receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_par.agreement import check_shapes
from functional_par.batch import Share
from functional_par.capture import Accumulator
from functional_par.comm.base import Group, World
from functional_par.pipeline.buffers import Buffers
from functional_par.pipeline.execute import Executor
from functional_par.pipeline.part import Part, make_part
from functional_par.pipeline.recording import Recording
from functional_par.plan import Plan
from functional_par.run_par import RunPar
from functional_par.vjp import engine as find_engine
from functional_par.vjp import undifferentiated
from functional_par.zero.gathered import Gathered, Lent, Resident, Weights

MOST_SHAPES = 8
"""Of microbatches, whose parts a rank keeps; those of others it works out again."""

Losses = list[tuple[Tensor, Tensor]]
"""Sum and count of each microbatch, in order; empty where the last stage is not."""


class Runner:
    """One rank's pipeline.

    Attributes:
        buffers: the memory that receives.
    """

    def __init__(self, plan: Plan, world: World, dtype: torch.dtype, engine: str, poison: bool) -> None:
        self.plan, self.world, self.dtype = plan, world, dtype
        self.engine, self.buffers = find_engine(engine), Buffers(world.device, poison)
        self.gathered = Gathered(plan, world, dtype, poison) if plan.zero == 3 else None
        self._parts: dict[Any, Part] = {}
        self._agreed = False

    def lent(self, group: Group) -> Group:
        """The group as layers get it."""
        threads = self.world.backend == "threads"
        return Lent(group, self.gathered) if self.gathered is not None and threads else group

    def train(
        self,
        params: Mapping[str, Tensor],
        share: Share,
        par: RunPar,
        gradients: Accumulator,
        scale: float,
        recording: Recording | None,
    ) -> Losses:
        """Forward and backward of all microbatches; gradients are those of ``scale`` times the sum of the losses."""
        part = self.part(share, training=True)
        seed = torch.tensor(scale, device=self.world.device, dtype=part.edges[-1].leaves[0].dtype)
        return self._executor(part, self.engine, params, share, par, seed, gradients, recording).run()

    def evaluate(self, params: Mapping[str, Tensor], share: Share, par: RunPar, recording: Recording | None) -> Losses:
        """Forward of all microbatches."""
        part, none = self.part(share, training=False), torch.zeros(())
        return self._executor(part, undifferentiated, params, share, par, none, None, recording).run()

    def part(self, share: Share, *, training: bool) -> Part:
        """What this rank runs for microbatches of the share's shapes, worked out once for each of the last few shapes."""
        shapes = share.shapes()
        key = training, *sorted(shapes.items())
        part = self._parts.pop(key, None)
        if part is None:
            part = make_part(self.plan, self.world, shapes, self.dtype, training=training)
        if not self._agreed:
            check_shapes(part, self.world)
            self._agreed = True
        self._parts[key] = part  # at the end, as the one that was used last
        if len(self._parts) > MOST_SHAPES:
            del self._parts[next(iter(self._parts))]
            self.buffers.forget()
        return part

    def _executor(
        self,
        part: Part,
        engine: Any,
        params: Mapping[str, Tensor],
        share: Share,
        par: RunPar,
        seed: Tensor,
        gradients: Accumulator | None,
        recording: Recording | None,
    ) -> Executor:
        return Executor(
            part,
            self.world,
            self.buffers,
            engine,
            lambda i: par.with_batch(share.microbatch(i), share.first_row(i)),
            params,
            seed,
            gradients,
            recording,
            self._weights(part, params),
        )

    def _weights(self, part: Part, params: Mapping[str, Tensor]) -> Weights:
        if self.gathered is None:
            return Resident(params)
        self.gathered.begin(params, part.order)
        return self.gathered
