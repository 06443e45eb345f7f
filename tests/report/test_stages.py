"""The choice of stages is shown: ranks, layers, parameters, share of the work, memory."""

from __future__ import annotations

from math import prod

import functional_par as fp
from functional_par.pipeline.memory import rank_memory, stage_memory
from functional_par.report.explain import explain
from functional_par.report.stages import share
from functional_par.report.text import collapse, ranges, size

from ..toys import small_gpt


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


def test_shares_are_all_of_the_work_the_loss_included():
    plan = plan_of()
    assert sum(share(plan, stage) for stage in range(2)) == 1.0
    costs = dict.fromkeys(["embed", "block0", "block1", "block2", "block3", "head"], 0) | {"loss": 2}
    assert share(plan_of(costs=costs, split=[3, 3]), 1) == 1.0
