"""What each stage and each pipeline rank of a plan needs in memory: parameters, gradients, the optimizer's state, and what
its layers keep for backward. Everything is counted in a trace; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from functional_par.errors import CompositionError
from functional_par.optim.base import Optimizer, slot_dtype
from functional_par.pipeline.kept import Kept, most_kept, stages_kept
from functional_par.pipeline.live import peaks
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.told import SLOTS
from functional_par.precision import Precision
from functional_par.zero.memory import held_elements, passing_elements

if TYPE_CHECKING:
    from functional_par.plan import Fields, Plan


@dataclass(frozen=True)
class MemoryBound:
    """How much memory each rank has for its stages, for ``stage_pp(memory=...)``.

    Attributes:
        bytes: for parameters, gradients, optimizer state and activations together.
        batch: shape of each field of a microbatch; by default those that the costs of the layers were measured with, or that
            the model itself declares, if it leaves neither rows nor other sizes open.
        dtype: of parameters and activations; by default the program's, or float32.
        slots: tensors that the optimizer keeps for each leaf, its copy of the parameters not counted; AdamW has two.

    Raises:
        CompositionError: a bound that is not positive, or a negative number of slots.
    """

    bytes: float
    batch: Mapping[str, Sequence[int]] | None = None
    dtype: torch.dtype | None = None
    slots: int = SLOTS

    def __post_init__(self) -> None:
        if (
            isinstance(self.bytes, bool)
            or not isinstance(self.bytes, (int, float))
            or not 0 < self.bytes < float("inf")
        ):
            raise CompositionError(
                f"MemoryBound(bytes={self.bytes!r}): it is a positive number of bytes a rank, such as 16e9."
            )
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or self.slots < 0:
            raise CompositionError(f"MemoryBound(slots={self.slots!r}): it is a number of tensors a leaf, such as 2.")


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage, or of one pipeline rank with all its stages.

    Attributes:
        parameters, gradients, state: of the leaves it holds, each once, in the dtypes of ``precision``; the optimizer's own
            copy of the parameters is a part of its state.
        saved: what its layers keep for the backward of one microbatch.
        live: microbatches whose forward has run and whose backward has not ended, at most.
        activations: what is kept at most at a time, with what a layer that runs again takes, and what weight gradients of such
            layers wait for.
        passing: what is gathered of parameters and not yet reduced of gradients at most at a time, with ``zero`` 2 and 3.
    """

    parameters: int
    gradients: int
    state: int
    saved: int
    live: int
    activations: int
    passing: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.state + self.activations + self.passing


def stage_memory(
    plan: Plan,
    batch: Fields | None = None,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | int = SLOTS,
    saved: Mapping[str, int] | None = None,
) -> tuple[Memory, ...]:
    """Bytes of each stage, in order, on one rank. A leaf that two stages of a rank share counts for both.

    Args:
        plan: a finished plan.
        batch: shape and dtype of each field of a microbatch; by default of the shapes that the plan was told with its costs or
            its bound of memory, else ``plan.example()``: one row, and small sizes where the model leaves them open.
        dtype: of parameters and activations; by default as ``precision`` says, else float32.
        optimizer: the optimizer, or how many tensors it keeps for each leaf.
        saved: bytes that each layer keeps for the backward of one such microbatch, as ``fp.measure`` finds them; by default
            as counted in the trace, that is without the fast kernels.
    """
    kinds, schedule = plan.precise(dtype), plan.timetable
    kept = stages_kept(plan, batch, kinds.compute, saved)
    slots = optimizer if isinstance(optimizer, int) else len(optimizer.slots)
    result = []
    for stage, live in enumerate(live_microbatches(schedule)):
        alone = [own if at == stage else Kept() for at, own in enumerate(kept)]
        most = max(most_kept(schedule, rank, alone) for rank in range(schedule.ranks))
        held = held_bytes(plan, plan.stage_leaves(stage), kinds, slots)
        result.append(Memory(*held, kept[stage].forward, live, most, passing_bytes(plan, [stage], kinds)))
    return tuple(result)


def rank_memory(
    plan: Plan,
    batch: Fields | None = None,
    dtype: torch.dtype | None = None,
    optimizer: Optimizer | int = SLOTS,
    saved: Mapping[str, int] | None = None,
) -> tuple[Memory, ...]:
    """Bytes of a rank at each pp coordinate: its leaves once, and the most that its stages keep at one time."""
    kinds, lives = plan.precise(dtype), peaks(plan.timetable)
    kept = stages_kept(plan, batch, kinds.compute, saved)
    slots = optimizer if isinstance(optimizer, int) else len(optimizer.slots)
    result = []
    for pp in range(plan.mesh.pp):
        mine = sum(kept[stage].forward for stage in plan.stages_on(pp))
        most = most_kept(plan.timetable, pp, kept)
        held = held_bytes(plan, plan.held(pp), kinds, slots)
        result.append(Memory(*held, mine, lives[pp], most, passing_bytes(plan, plan.stages_on(pp), kinds)))
    return tuple(result)


def held_bytes(plan: Plan, paths: Iterable[str], kinds: Precision, slots: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state of some leaves on one rank."""
    held, trained, moved = held_elements(plan, paths)
    each = slot_dtype(kinds.master).itemsize * slots + (kinds.master.itemsize if kinds.mastered else 0)
    return held * kinds.compute.itemsize, trained * kinds.accumulate.itemsize, moved * each


def passing_bytes(plan: Plan, stages: Iterable[int], kinds: Precision) -> int:
    """Bytes of parameters that are gathered, and of gradients that are not yet reduced, at most at a time."""
    gathered, waiting = passing_elements(plan, (layer.name for s in stages for layer in plan.stage_layers(s)))
    return gathered * kinds.compute.itemsize + waiting * kinds.accumulate.itemsize


def live_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """For each stage the largest number of microbatches whose forward has run and whose backward has not ended. Where it is
    split it ends with the weights' half."""
    stages = range(schedule.stages)
    return tuple(max(peaks(schedule, [int(other == stage) for other in stages])) for stage in stages)
