"""Cutting the list of layers into stages."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import functional_par as fp
from functional_par import CompositionError, Mesh, ScheduleError
from functional_par.transforms import split_by_cost

from ..toys import odd, small_gpt


def brute_force(costs, stages):
    """Cost of the slowest stage of the best of all splits."""
    n = len(costs)
    best = None
    for cuts in combinations(range(1, n), stages - 1):
        bounds = (0, *cuts, n)
        slowest = max(sum(costs[a:b]) for a, b in pairwise(bounds))
        best = slowest if best is None else min(best, slowest)
    return best


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data())
def test_the_slowest_stage_is_as_fast_as_that_of_the_best_split(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    sizes = split_by_cost(costs, stages)
    assert len(sizes) == stages
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    bounds = [sum(sizes[:i]) for i in range(stages + 1)]
    assert max(sum(costs[a:b]) for a, b in pairwise(bounds)) == brute_force(costs, stages)


def test_among_equal_splits_the_first_stages_get_fewer_layers():
    assert split_by_cost([0, 0, 0, 0], 2) == (1, 3)
    assert split_by_cost([0, 4, 4, 4, 4, 3], 2) == (3, 3)
    assert split_by_cost([5], 1) == (1,)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(
        CompositionError, match=r"3 pipeline stages, but the model has only 2 layers\. Use a pp \(times chunks\) of at most 2\."
    ):
        split_by_cost([1, 1], 3)
    with pytest.raises(
        CompositionError, match=r"8 pipeline stages, but the model has only 4 layers\. Use a pp \(times chunks\) of at most 4\."
    ):
        fp.compose(fp.stage_pp())(small_gpt(blocks=2)).plan(Mesh(pp=8))


@pytest.mark.parametrize("pp", [1, 2, 5, 9])
def test_stages_hold_every_layer_once_in_order(pp):
    plan = fp.compose(fp.stage_pp())(small_gpt(blocks=7)).plan(Mesh(pp=pp))
    assert [name for names in plan.stages for name in names] == [layer.name for layer in plan.model.layers]
    assert len(plan.stages) == pp
    assert all(plan.stages)
    assert plan.stage_of["loss"] == pp - 1
    assert plan.stage_layers(pp - 1)[-1] is plan.model.loss


def test_seven_blocks_lie_evenly_on_two_stages_with_the_head_counted():
    plan = fp.compose(fp.stage_pp())(fp.models.gpt(512, 16, 7, 4, 16)).plan(Mesh(pp=2))
    cost = [sum(plan.costs[name] for name in names) for names in plan.stages]
    cost[1] += plan.costs["loss"]
    assert max(cost) == brute_force([*list(plan.costs.values())[:-2], plan.costs["head"] + plan.costs["loss"]], 2)


def test_a_split_by_hand_is_kept():
    plan = fp.compose(fp.stage_pp(split=[1, 1, 2]))(small_gpt()).plan(Mesh(pp=3))
    assert plan.stages == (("embed",), ("block0",), ("block1", "head"))


def test_a_split_by_hand_is_not_used_without_pp():
    assert len(fp.compose(fp.stage_pp(split=[1, 1, 2]))(small_gpt()).plan(Mesh()).stages) == 1


def test_a_stage_without_parameters_holds_nothing():
    plan = fp.compose(fp.stage_pp(split=[1, 1, 3]))(odd()).plan(Mesh(pp=3))
    assert plan.stages[1] == ("mask",)
    assert plan.stage_leaves(1) == ()
    assert plan.specs["temperature"].owners == (2,)


@pytest.mark.parametrize(("split", "pp"), [([1, 3], 3), ([1, 1, 1], 3), ([2, 2, 2], 3), ([4], 2)])
def test_a_split_that_does_not_fit_is_refused_with_both_counts(split, pp):
    message = (
        f"stage_pp(split={split}): {len(split)} stages with {sum(split)} layers in all, but Mesh(pp={pp}) has pp={pp} with "
        f"{pp} stages under 1f1b, and the model has 4 layers (embed, block0, block1, head)."
    )
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.compose(fp.stage_pp(split=split))(small_gpt()).plan(Mesh(pp=pp))


@pytest.mark.parametrize("split", [[0, 4], [2, -1], [1.0, 3], [True, 3]])
def test_a_stage_gets_at_least_one_layer(split):
    message = f"stage_pp(split={split}): each stage gets an integer number of layers, at least 1."
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.stage_pp(split=split)


def test_a_split_is_a_list():
    with pytest.raises(
        CompositionError, match=re.escape("stage_pp(split=3): it is a list with the number of layers of each")
    ):
        fp.stage_pp(split=3)


@pytest.mark.parametrize("microbatches", [0, -1, 1.0, True, "2", None])
def test_microbatches_are_a_positive_integer(microbatches):
    message = f"stage_pp(microbatches={microbatches!r}): it is an integer of at least 1."
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.stage_pp(microbatches=microbatches)


@pytest.mark.parametrize("schedule", ["gpip", "zb", ""])
def test_an_unknown_schedule_is_refused_with_those_there_are(schedule):
    with pytest.raises(ScheduleError, match=r"afab, 1f1b, interleaved"):
        fp.stage_pp(schedule=schedule)


@pytest.mark.parametrize("schedule", [None, 3, ["0F0"]])
def test_a_schedule_is_a_name_a_file_a_schedule_or_a_function(schedule):
    message = f"stage_pp(schedule={schedule!r}): a name, a path to a CSV file, an fp.Schedule, or a function"
    with pytest.raises(CompositionError, match=re.escape(message)):
        fp.stage_pp(schedule=schedule)
