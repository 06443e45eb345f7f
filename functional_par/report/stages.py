"""The stages of a pipeline for people: their ranks and layers, what each computes, and what it needs in memory."""

from __future__ import annotations

import torch

from functional_par.optim.base import slot_dtype
from functional_par.pipeline.memory import Memory, rank_memory, stage_memory
from functional_par.pipeline.products import FULL, SELECTIVE
from functional_par.pipeline.told import Told, fields_of
from functional_par.plan import Fields, Plan
from functional_par.precision import Precision
from functional_par.report.text import collapse, fields, listed, ranges, size, table
from functional_par.zero.memory import held_elements


def stages(plan: Plan) -> str:
    """A table with a row for each stage, and what its numbers are."""
    rows = [("stage", "layers", "parameters a rank", "work", "state", "activations", "ranks")]
    for stage, (names, memory) in enumerate(zip(plan.stages, stage_memory(plan, *counted(plan)), strict=True)):
        held = held_elements(plan, plan.stage_leaves(stage)).parameters
        ranks = [rank for rank in range(plan.mesh.size) if plan.mesh.coords(rank).pp == plan.placement[stage]]
        rows.append(
            (
                str(stage),
                collapse(names),
                f"{held:,}",
                f"{100 * share(plan, stage):.0f}%",
                size(held_by_state(memory)),
                activations(memory),
                ranges(ranks),
            )
        )
    return f"{table(rows)}\n\n{_legend(plan)}"


def share(plan: Plan, stage: int) -> float:
    """A stage's part of all work."""
    total = sum(plan.costs.values()) or 1
    return sum(plan.costs.get(layer.name, 0) for layer in plan.stage_layers(stage)) / total


def held_by_state(memory: Memory) -> int:
    """Bytes that are there from step to step."""
    return memory.parameters + memory.gradients + memory.state


def activations(memory: Memory) -> str:
    """How often and how much, and what comes on top."""
    more = memory.activations - memory.live * memory.saved
    return f"{memory.live} * {size(memory.saved)}" + (f" + {size(more)}" if more > 0 else "")


def _legend(plan: Plan) -> str:
    told = _told(plan)
    lines = [
        f"state: {_state(told, precision_of(plan))}. activations: microbatches alive at a",
        f"time * what the layers keep for backward of one with {fields(told.batch)}; fast kernels keep less.",
    ]
    if plan.remat:
        lines.append(_remat(plan))
    if passing := max(memory.passing for memory in rank_memory(plan, *counted(plan))):
        what = "parameters that are gathered and gradients" if plan.zero == 3 else "gradients"
        lines.append(
            f"In passing there are {what} that are not yet reduced, of two layers: at most {size(passing)} a rank."
        )
    if plan.told is None and any(None in given.shape[1:] for given in (plan.model.batch or {}).values()):
        lines.append("The model leaves sizes open, and these are made up: explain(mesh, batch=...) takes yours.")
    if len(plan.stages) > plan.mesh.pp:
        lines += [_rank(plan, pp, memory) for pp, memory in enumerate(rank_memory(plan, *counted(plan)))]
    return "\n".join(lines)


def run_again(plan: Plan) -> str:
    """What is kept of the layers that run again."""
    kinds = {FULL: "inputs", SELECTIVE: "inputs and matrix products"}
    chosen = {kind: [name for name, policy in plan.remat.items() if policy == kind] for kind in kinds}
    return "kept are " + "; ".join(f"of {collapse(names)} {kinds[kind]}" for kind, names in chosen.items() if names)


def _remat(plan: Plan) -> str:
    return (
        f"remat: {run_again(plan)}. What comes on top (+) is of one layer that runs again, and what weight gradients wait "
        "for."
    )


def _told(plan: Plan) -> Told:
    """What the plan was told, else a small microbatch."""
    return plan.told or Told({name: shape for name, (shape, _) in plan.example().items()})


def precision_of(plan: Plan) -> Precision:
    """The dtypes of a step, as far as the plan knows: of the program, or those that it was told."""
    return plan.precise(None if plan.precision else _told(plan).dtype)


def counted(plan: Plan) -> tuple[Fields, torch.dtype, int]:
    """What memory is counted with: the fields of a microbatch, the dtype, and the optimizer's tensors for each leaf."""
    told, dtype = _told(plan), precision_of(plan).compute
    counted = fields_of(plan.model, told.batch, dtype) if plan.told else plan.example()
    return counted, dtype, told.slots


def _state(told: Told, kinds: Precision) -> str:
    """What is there from step to step, with its dtypes."""
    moments = f"{told.slots} moment{'' if told.slots == 1 else 's'} of an optimizer"
    parts = [("parameters", kinds.compute), ("gradients", kinds.accumulate)]
    parts += [("a master copy", kinds.master)] if kinds.mastered else []
    if len({kind for _, kind in parts}) == 1:
        return f"parameters, gradients and {moments}, in {str(kinds.compute).removeprefix('torch.')}"
    by: dict[str, list[str]] = {}
    for what, kind in (*parts, (moments, slot_dtype(kinds.master))):
        by.setdefault(str(kind).removeprefix("torch."), []).append(what)
    return "; ".join(f"{listed(names)} in {kind}" for kind, names in by.items())


def _rank(plan: Plan, pp: int, memory: Memory) -> str:
    """What a rank with several stages has in all."""
    own = plan.stages_on(pp)
    work = 100 * sum(share(plan, stage) for stage in own)
    return (
        f"ranks at pp={pp}: stages {ranges(own)}, {work:.0f}% of the work, state {size(held_by_state(memory))}, activations at "
        f"most {size(memory.activations)}"
    )
