"""How many bytes the stages of a plan keep for backward, by what ``remat`` says of their layers, while a schedule runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from functional_par.pipeline.products import FULL, NONE
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.told import fields_of

if TYPE_CHECKING:
    from functional_par.plan import Fields, Plan
    from functional_par.trace import LayerTrace


class Kept(NamedTuple):
    """Bytes of one layer, or of the layers of a stage, for one microbatch.

    Attributes:
        forward: from its forward to the end of its backward, or of the first half of that.
        again: on top, at most, while a layer runs of which not all is kept, for the first time or again: it is differentiated
            both times, so that torch takes the same kernels.
        waiting: from the first half of a backward to the end of the second.
    """

    forward: int = 0
    again: int = 0
    waiting: int = 0

    @classmethod
    def of_layer(cls, policy: str, traced: LayerTrace, measured: int | None = None) -> Kept:
        """What is kept of one layer.

        Args:
            policy: of ``remat``.
            traced: what it does.
            measured: bytes that it was found to keep; None takes those of the trace.
        """
        if policy == NONE:  # what waits for weight gradients is a part of what was saved, and most of it
            saved = traced.saved if measured is None else measured
            return cls(saved, 0, saved)
        products = 0 if policy == FULL else traced.products
        forward = traced.inputs + products if measured is None else measured
        return cls(forward, traced.inner, traced.waiting)

    @classmethod
    def of_stage(cls, layers: Iterable[Kept]) -> Kept:
        """What is kept of the layers of a stage, in order. The last one's backward runs first, when all others are kept."""
        forward = peak = waiting = 0
        for layer in layers:
            forward, waiting = forward + layer.forward, waiting + layer.waiting
            peak = max(peak, forward + layer.again)
        return cls(forward, max(0, peak - forward), waiting)


def layers_kept(plan: Plan, traced: Mapping[str, LayerTrace], measured: Mapping[str, int] | None) -> dict[str, Kept]:
    """What is kept of each layer, the loss included."""
    return {
        name: Kept.of_layer(plan.remat.get(name, NONE), layer, None if measured is None else measured[name])
        for name, layer in traced.items()
    }


def stages_kept(
    plan: Plan,
    batch: Fields | None = None,
    dtype: torch.dtype = torch.float32,
    measured: Mapping[str, int] | None = None,
) -> list[Kept]:
    """What is kept of each stage for one microbatch; the arguments are those of ``stage_memory``."""
    if batch is None and plan.told is not None:
        batch = fields_of(plan.model, plan.told.batch, dtype)
    layers = layers_kept(plan, plan.trace(batch, dtype).layers, measured)
    stages = range(len(plan.stages))
    return [Kept.of_stage(layers[layer.name] for layer in plan.stage_layers(stage)) for stage in stages]


def most_kept(schedule: Schedule, rank: int, stages: Sequence[Kept]) -> int:
    """The most bytes that a rank of the pipeline keeps at a time."""
    trains = any(action.kind != "F" for row in schedule.rows for action in row)
    now = most = 0
    for action in schedule.rows[rank]:
        stage = stages[action.stage]
        if action.kind == "F":
            now += stage.forward
            most = max(most, now + (stage.again if trains else 0))
            now -= 0 if trains else stage.forward
        elif action.kind == "W":
            now -= stage.waiting
        else:
            most = max(most, now + stage.again)
            now += (stage.waiting if action.kind == "I" else 0) - stage.forward
            most = max(most, now)
    return most


def most_waiting(schedule: Schedule, stage: int) -> int:
    """The largest number of microbatches of a stage that are between the two halves of their backward."""
    now = most = 0
    for action in (action for row in schedule.rows for action in row if action.stage == stage):
        now += {"I": 1, "W": -1}.get(action.kind, 0)
        most = max(most, now)
    return most
