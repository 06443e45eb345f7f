"""Is the step a pure function, and does a step that consumes its state give the same bits? Asked on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from functional_par.comm.base import World
from functional_par.program import Program
from functional_par.run import run
from functional_par.state import State
from functional_par.testing.batch import fields_of
from functional_par.testing.case import ADAMW, Case
from functional_par.testing.properties import fail


def the_step_is_pure(case: Case) -> None:
    """The same call gives the same bits and leaves its arguments alone; a step that consumes its state gives these bits too."""
    program, batches = case.program(), [fields_of(batch) for batch in case.batches()]
    results = run(lambda world: list(_impure(case, program, world, batches)), case.layout.mesh, backend="threads")
    fail(f"{case.layout}:", [f"rank {rank}: {what}" for rank, found in enumerate(results) for what in found])


def _impure(case: Case, program: Program, world: World, batches: list[dict[str, Tensor]]) -> Iterator[str]:
    options: Any = {"clip": case.clip, "norm": case.norm, "dtype": torch.float64, "engine": case.layout.engine}
    step = program.step(world, ADAMW, **options)
    donating = program.step(world, ADAMW, donate=True, **options)
    state, gone = step.init(0), donating.init(0)
    for i, batch in enumerate(batches, 1):
        before, fields_before = _copy(state), {name: x.clone() for name, x in batch.items()}
        once, metrics = step(state, batch)
        again, metrics_again = step(state, batch)
        gone, metrics_gone = donating(gone, batch)
        if _differ(state, before):
            yield f"step {i} writes to the state that it is given: {', '.join(_differ(state, before))}"
        if not all(torch.equal(x, fields_before[name]) for name, x in batch.items()):
            yield f"step {i} writes to the batch that it is given"
        if metrics != metrics_again or _differ(once, again):
            yield f"step {i}, called twice, gives different bits: {', '.join(_differ(once, again)) or 'metrics'}"
        if metrics != metrics_gone or _differ(once, gone):
            yield f"step {i} with donate=True gives other bits: {', '.join(_differ(once, gone)) or 'metrics'}"
        state = once


def _flat(state: State) -> dict[str, Tensor]:
    slots = state.flat_opt.items()
    return state.flat | {f"{slot} of {path}": x for slot, leaves in slots for path, x in leaves.items()}


def _copy(state: State) -> State:
    slots = {slot: {path: x.clone() for path, x in leaves.items()} for slot, leaves in state.flat_opt.items()}
    return State(state.step, state.seed, {path: x.clone() for path, x in state.flat.items()}, slots)


def _differ(one: State, two: State) -> list[str]:
    a, b = _flat(one), _flat(two)
    return [name for name in a if name not in b or not torch.equal(a[name], b[name])]
