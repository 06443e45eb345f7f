"""Which stage's output each leaf of a stage's input is. A leaf that stages hand on untouched goes straight from the stage
that made it to the one that reads it; a field of the batch goes nowhere, since every rank has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils import _pytree as pytree

from functional_par.model import LOSS
from functional_par.pipeline.schedule import Edges
from functional_par.plan import Plan
from functional_par.trace import LayerTrace, Trace

BATCH = -1
"""In the place of a stage: the fields of the microbatch."""


class Origin(NamedTuple):
    """Where a leaf was made: a stage (or ``BATCH``) and the place among its output leaves."""

    stage: int
    place: int


@dataclass(frozen=True)
class Routes:
    """The flow of leaves between stages.

    Attributes:
        inputs: for each stage and each leaf of its input its origin, or None if the stage does not read it.
    """

    inputs: tuple[tuple[Origin | None, ...], ...]

    @property
    def edges(self) -> Edges:
        """The pairs of stages between which something goes; stages that follow each other always do."""
        follow = {(stage - 1, stage) for stage in range(1, len(self.inputs))}
        made = {
            (origin.stage, stage)
            for stage, inputs in enumerate(self.inputs)
            for origin in inputs
            if origin is not None and origin.stage != BATCH
        }
        return tuple(sorted(follow | made))

    def between(self, producer: int, consumer: int) -> tuple[tuple[int, int], ...]:
        """(place among the outputs, place among the inputs) of what goes from one stage to another."""
        return tuple(
            (origin.place, place)
            for place, origin in enumerate(self.inputs[consumer])
            if origin is not None and origin.stage == producer
        )


def routes(plan: Plan, traced: Trace) -> Routes:
    """The routes between the stages of a plan."""
    origins = [Origin(BATCH, place) for place in range(len(traced.batch))]
    inputs = []
    for stage, names in enumerate(plan.stages):
        entries = [traced.layers[name] for name in names]
        if stage == len(plan.stages) - 1:
            entries.append(traced.layers[LOSS])
        kept, read = flow(entries, len(origins), last=stage == len(plan.stages) - 1)
        inputs.append(tuple(origin if place in read else None for place, origin in enumerate(origins)))
        origins = [
            Origin(stage, place) if at is None or (at in read and _carries(entries[-1], place)) else origins[at]
            for place, at in enumerate(kept)
        ]
    return Routes(tuple(inputs))


def flow(entries: Sequence[LayerTrace], count: int, last: bool) -> tuple[list[int | None], set[int]]:
    """Follow the input leaves of a stage through its layers.

    Returns:
        For each leaf of the stage's output the leaf of its input that it is, or None; and the leaves of the input that some
        layer computes with. The last stage, whose output is the loss, hands nothing on.
    """
    places: list[int | None] = list(range(count))
    read: set[int] = set()
    for entry in entries:
        read |= {at for i in entry.touched if (at := places[i]) is not None}
        places = [None if i is None else places[i] for i in entry.passed]
    if last:  # the loss may be a leaf of its input
        return [], read | {at for at in places if at is not None}
    return places, read


def _carries(entry: LayerTrace, place: int) -> bool:
    """Whether a cotangent comes back through a leaf of the output: then a stage that reads it sums all of them."""
    return bool(pytree.tree_leaves(entry.output)[place].value.grad)
