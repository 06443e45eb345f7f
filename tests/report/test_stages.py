"""The choice of stages is shown: ranks, layers, parameters, share of the work, memory."""

from __future__ import annotations

from math import prod

import torch

import functional_par as fp
from functional_par.pipeline.memory import rank_memory, stage_memory
from functional_par.report.explain import explain
from functional_par.report.stages import held_by_state, share
from functional_par.report.text import collapse, ranges, size

from ..toys import odd, small_gpt


def plan_of(schedule="1f1b", **options):
    transforms = (
        fp.tie("head.weight", "embed.weight"),
        fp.shard_tp(),
        fp.stage_pp(schedule, 3, **options),
        fp.dp_reduce(),
    )
    return fp.compose(*transforms)(small_gpt(blocks=4)).plan(fp.Mesh(dp=2, pp=2, tp=2))


def test_each_stage_has_a_row_with_what_a_rank_holds_and_keeps():
    plan = plan_of("zbv")
    table = next(part for part in str(explain(plan)).split("\n\n") if part.startswith("stage"))
    for line, stage, memory in zip(table.split("\n")[2:], range(4), stage_memory(plan), strict=True):
        held = sum(prod(plan.specs[path].local_shape(plan.mesh)) for path in plan.stage_leaves(stage))
        ranks = "0-3" if plan.placement[stage] == 0 else "4-7"
        state = memory.parameters + memory.gradients + memory.state
        words = [stage, collapse(plan.stages[stage]), f"{held:,}", f"{100 * share(plan, stage):.0f}%", size(state)]
        assert line.split() == " ".join(map(str, [*words, f"{memory.live} * {size(memory.saved)}", ranks])).split()


def test_a_rank_with_several_stages_has_a_line_with_all_of_them():
    plan = plan_of("zbv")
    legend = next(part for part in str(explain(plan)).split("\n\n") if part.startswith("state: "))
    assert "of one with tokens 1 4, labels 1 4; fast kernels keep less." in legend
    lines = legend.split("\n")[2:]
    for pp, (line, memory) in enumerate(zip(lines, rank_memory(plan), strict=True)):
        state, kept = memory.parameters + memory.gradients + memory.state, memory.activations
        assert line.startswith(f"ranks at pp={pp}: stages {ranges(plan.stages_on(pp))}, ")
        assert line.endswith(f"% of the work, state {size(state)}, activations at most {size(kept)}")


def odd_plan(**options):
    return fp.compose(fp.stage_pp("afab", 3, split=[2, 3], **options))(odd())


def shown(program, batch=None):
    """Cells of activations, and what is said of them."""
    text = str(program.explain(fp.Mesh(pp=2), batch))
    table, legend = (next(part for part in text.split("\n\n") if part.startswith(at)) for at in ("stage", "state: "))
    at = table.index("activations")
    return [line[at : line.rindex("  ")].strip() for line in table.split("\n")[2:]], legend


def test_activations_are_of_the_shapes_that_the_plan_was_told_or_explain_is():
    shapes = {"tokens": (5, 32), "labels": (5, 32)}
    fields = {name: (shape, torch.int64) for name, shape in shapes.items()}
    expected = [f"3 * {size(memory.saved)}" for memory in stage_memory(odd_plan().plan(fp.Mesh(pp=2)), fields)]
    bound, costs = fp.MemoryBound(1e9, shapes), fp.measure(odd(), shapes, rounds=1)
    for cells, legend in (
        shown(odd_plan(memory=bound)),
        shown(odd_plan(costs=costs)),
        shown(odd_plan(costs=costs, memory=1e9)),
        shown(odd_plan(), shapes),
        shown(odd_plan(), {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}),
        shown(odd_plan(memory=fp.MemoryBound(1e9, dict.fromkeys(shapes, (1, 3)))), shapes),
    ):
        assert cells == expected
        assert "of one with tokens 5 32, labels 5 32; fast kernels keep less." in legend
        assert "made up" not in legend
    told = odd_plan(costs=costs).plan(fp.Mesh(pp=2))
    assert stage_memory(told) == stage_memory(told, fields)
    assert rank_memory(told) == rank_memory(told, fields)


def test_sizes_that_nobody_said_are_called_made_up():
    legend = shown(odd_plan())[1]
    assert "of one with tokens 1 2, labels 1 2; fast" in legend
    assert legend.endswith("The model leaves sizes open, and these are made up: explain(mesh, batch=...) takes yours.")
    assert "made up" not in str(explain(plan_of()))


def test_dtype_and_moments_are_those_of_the_bound():
    shapes = {"tokens": (5, 32), "labels": (5, 32)}
    fields = {name: (shape, torch.int64) for name, shape in shapes.items()}
    program = odd_plan(memory=fp.MemoryBound(1e9, shapes, torch.bfloat16, slots=1))
    cells, legend = shown(program)
    memories = stage_memory(program.plan(fp.Mesh(pp=2)), fields, torch.bfloat16, 1)
    assert cells == [f"3 * {size(memory.saved)}" for memory in memories]
    assert legend.startswith(
        "state: parameters in bfloat16; gradients, a master copy and 1 moment of an optimizer in float32. act"
    )
    assert all(f"  {size(held_by_state(memory))}  " in str(program.explain(fp.Mesh(pp=2))) for memory in memories)
    wide = odd_plan(memory=fp.MemoryBound(1e9, shapes, torch.float64, slots=0))
    assert shown(wide)[1].startswith("state: parameters, gradients and 0 moments of an optimizer, in float64. act")


def test_shares_are_all_of_the_work_the_loss_included():
    plan = plan_of()
    assert sum(share(plan, stage) for stage in range(2)) == 1.0
    costs = dict.fromkeys(["embed", "block0", "block1", "block2", "block3", "head"], 0) | {"loss": 2}
    assert share(plan_of(costs=costs, split=[3, 3]), 1) == 1.0
