"""Schedules that are made for the costs of a plan's stages."""

from __future__ import annotations

import functional_par as fp
from functional_par import Mesh
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.layer_costs import LayerCosts
from functional_par.pipeline.makers import one_f_one_b
from functional_par.pipeline.memory import MemoryBound
from functional_par.pipeline.simulate import simulate

from ..toys import small_gpt


def test_schedules_by_costs_are_made_for_the_stages_of_the_plan():
    model, uneven = small_gpt(blocks=4), {}
    costs = {layer.name: 1.0 for layer in model.all_layers} | {"block0": 9.0}
    for name in (None, "zb-1p", "zb-2p", "1f1b"):
        plan = fp.compose(fp.stage_pp(name, microbatches=6, costs=costs, split=[3, 3]))(model).plan(Mesh(pp=2))
        assert plan.stage_costs.forward == [11.0, 4.0]
        ran = simulate(plan.timetable, plan.stage_costs)
        assert max(ran.live) <= (3 if plan.schedule == "zb-2p" else 2)
        uneven[name] = plan.schedule, ran.makespan
    assert uneven[None] == uneven["zb-2p"]
    assert uneven["zb-2p"][1] <= uneven["zb-1p"][1] < uneven["1f1b"][1]
    assert fp.compose(fp.stage_pp(microbatches=6))(model).plan(Mesh()).timetable.rows == one_f_one_b(1, 6).rows


def test_measured_costs_tell_the_parts_of_a_backward():
    model = small_gpt(blocks=4)
    names = [layer.name for layer in model.all_layers]
    apart = LayerCosts(*(dict.fromkeys(names, part) for part in (1.0, 2.0, 0.5)), dict.fromkeys(names, 0))
    plan = fp.compose(fp.stage_pp(costs=apart, split=[2, 4]))(model).plan(Mesh(pp=2))
    assert plan.stage_costs == Costs([2.0, 5.0], [4.0, 10.0], [1.0, 2.5])


def test_a_bound_of_memory_takes_the_schedule_with_the_memory_of_1f1b():
    plan = fp.compose(fp.stage_pp(microbatches=4, memory=MemoryBound(1e9, {"tokens": (1, 4), "labels": (1, 4)})))(
        small_gpt(blocks=4)
    ).plan(Mesh(pp=2))
    assert plan.schedule == "zb-1p"
