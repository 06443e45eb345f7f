"""Where the list of layers is cut: by dynamic programming, as all cuts tried one by one tell, or by hand."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par.errors import CompositionError
from functional_par.pipeline import split
from functional_par.pipeline.by_hand import check_form, sizes_of
from functional_par.pipeline.split import SLACK, best_split, gigabytes

LAYERS = ("embed", "block0", "block1", "block2", "block3", "head")


def every_split(layers, stages):
    for cuts in combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, layers)))


def by_stage(costs, sizes):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def by_rank(costs, sizes, placement):
    loads = [0] * (max(placement) + 1)
    for rank, load in zip(placement, by_stage(costs, sizes), strict=True):
        loads[rank] += load
    return loads


def round_robin(ranks, chunks):
    return tuple(range(ranks)) * chunks


def there_and_back(ranks):
    return (*range(ranks), *reversed(range(ranks)))


@st.composite
def problems(draw):
    placement = draw(
        st.sampled_from(
            [round_robin(p, v) for p in (1, 2, 3, 4) for v in (1, 2, 3) if p * v <= 6]
            + [there_and_back(p) for p in (1, 2, 3)]
        )
        | st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)  # a user's own
    )
    layers = draw(st.integers(len(placement), 9))
    costs = draw(st.lists(st.integers(0, 300), min_size=layers, max_size=layers))
    needs = draw(st.lists(st.integers(0, 20), min_size=layers, max_size=layers))
    weights = draw(st.lists(st.integers(1, 3), min_size=len(placement), max_size=len(placement)))
    return placement, costs, needs, weights, draw(st.integers(0, 120))


def best_by_trying(splits, costs, placement):
    """Load of the slowest rank that has to be, and of the slowest stage where ranks may be one part in SLACK slower."""
    slowest = min(max(by_rank(costs, sizes, placement)) for sizes in splits)
    near = slowest + slowest // SLACK
    return slowest, min(max(by_stage(costs, s)) for s in splits if max(by_rank(costs, s, placement)) <= near)


@given(problems())
def test_no_split_has_a_faster_slowest_rank_and_none_near_it_a_faster_slowest_stage(problem):
    placement, costs, *_ = problem
    sizes = best_split(costs, placement)
    assert len(sizes) == len(placement)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    slowest, stage = best_by_trying(list(every_split(len(costs), len(placement))), costs, placement)
    assert max(by_rank(costs, sizes, placement)) <= slowest + slowest // SLACK
    assert max(by_stage(costs, sizes)) == stage


@given(problems())
def test_within_a_bound_of_memory_the_split_is_the_best_of_those_that_fit(problem):
    placement, costs, needs, weights, room = problem

    def need(stage, start, end):
        return weights[stage] * sum(needs[start:end])

    def held(sizes):
        ranks, start = [0] * (max(placement) + 1), 0
        for stage, size in enumerate(sizes):
            ranks[placement[stage]] += need(stage, start, start + size)
            start += size
        return max(ranks)

    splits = list(every_split(len(costs), len(placement)))
    fitting = [sizes for sizes in splits if held(sizes) <= room]
    if fitting:
        sizes = best_split(costs, placement, need, room)
        slowest, stage = best_by_trying(fitting, costs, placement)
        assert held(sizes) <= room
        assert max(by_rank(costs, sizes, placement)) <= slowest + slowest // SLACK
        assert max(by_stage(costs, sizes)) == stage
    else:
        least = min(map(held, splits))
        text = f"fits into {gigabytes(room)} a rank: the one that needs the least is "
        with pytest.raises(CompositionError, match=re.escape(text)) as info:
            best_split(costs, placement, need, room)
        assert f"with {gigabytes(least)} on its fullest rank. Give a rank more room, raise pp or tp" in str(info.value)


def test_where_too_few_beginnings_are_followed_the_split_that_needs_least_still_fits(monkeypatch):
    monkeypatch.setattr(split, "WIDTH", 1)
    monkeypatch.setattr(split, "LEAST_WIDTH", 1)
    needs = [2, 2, 1, 0, 1]
    sizes = best_split([1, 1, 2, 1, 2], (0, 1, 0, 1), lambda stage, start, end: sum(needs[start:end]), 3)
    assert max(by_rank(needs, sizes, (0, 1, 0, 1))) <= 3


def test_with_one_stage_a_rank_no_slack_is_used_and_the_first_stages_get_fewer_layers():
    assert best_split([0] * 4, (0, 1)) == (1, 3)
    assert best_split([101, 100, 1], (0, 1)) == (1, 2)


@pytest.mark.parametrize("placement", [round_robin(4, 2), there_and_back(4), round_robin(4, 4), round_robin(8, 4)])
def test_of_many_equal_blocks_no_rank_has_a_block_more_than_the_mean(placement):
    costs = [0, *[1000] * 64, 1200]
    sizes = best_split(costs, placement)
    assert max(by_rank(costs, sizes, placement)) < sum(costs) / (max(placement) + 1) + 1000


def test_more_stages_than_layers_are_refused():
    text = "6 pipeline stages, but the model has only 4 layers. Use a pp (times chunks) of at most 4."
    with pytest.raises(CompositionError, match=re.escape(text)) as caught:
        best_split([1] * 4, round_robin(3, 2))
    assert str(caught.value).startswith("pp=3 * chunks=2 = 6: ")
    for placement, asked in (((0, 1, 2, 3, 4), "pp=5: 5 pipe"), ((0, 1, 0, 1, 0), "pp=2: 5 pipe")):
        with pytest.raises(CompositionError, match=asked):
            best_split([1] * 4, placement)


@pytest.mark.parametrize(
    "split",
    [
        [3, 2, 1],
        ["embed block0-1", "block2-3", "head"],
        ["embed block0,1", "block2 block3", "head"],
        [["embed", "block0", "block1"], ("block2-3",), ["head"]],
    ],
    ids=["counts", "ranges", "commas", "lists"],
)
def test_counts_names_and_ranges_say_the_same(split):
    assert sizes_of(check_form(split), LAYERS, 3, "") == (3, 2, 1)


def test_a_layer_whose_name_looks_like_a_range_is_that_layer():
    layers = ("a0-1", "a0", "a1")
    assert sizes_of(check_form(["a0-1", "a0 a1"]), layers, 2, "") == (1, 2)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (["embed bloc0-3", "head"], "stage 0 names 'bloc0', which is no layer. Is it 'block0'? Layers: embed, block0,"),
        (["embed block0-3", "x"], "stage 1 names 'x', which is no layer. Layers: embed, block0, "),
        (["embed block0-9", "head"], "stage 0 names 'block4', which is no layer."),
        (["embed block0-3", "head loss"], "stage 1 names the loss, which is always on the last stage. Leave it out."),
        (
            ["embed block0", "block2-3 head"],
            "of the model's 6 layers 1 on no stage: block1. Order of the layers: embed,",
        ),
        (["embed block0-2", "block2-3 head"], "layer 'block2' is named twice, on stage 0 and on stage 1. Keep one."),
        (
            ["embed block1", "block0 block2-3 head"],
            "stage 0 has 'block1' where 'block0' comes in the model, which stands on stage 1. Stages cut the list of layers; "
            "they do not reorder it: embed,",
        ),
        (["embed block0-3 head", ""], "stage 1 has no layer; a stage has at least one."),
        (
            ["embed", "block0-3", "head"],
            "the layers of 3 stages are named, but Mesh(pp=2) has pp=2. Name those of 2 stages.",
        ),
        (
            [4, 3],
            "stage_pp(split=[4, 3]): 2 stages with 7 layers in all, but Mesh(pp=2) has pp=2, and the model has 6",
        ),
        ([["embed", 3], 2], "stage_pp(split=[['embed', 3], 2]): ['embed', 3] is not a stage's layers by name."),
        (
            [3, "head"],
            "stage_pp(split=[3, 'head']): 3 is not a stage's layers by name. Give every stage as a list of names",
        ),
        (
            "embed head",
            "stage_pp(split='embed head'): it is a list with the number of layers of each stage, such as [3,",
        ),
        ([0, 6], "stage_pp(split=[0, 6]): each stage gets an integer number of layers, at least 1."),
    ],
)
def test_a_split_by_hand_that_is_wrong_says_where(split, words):
    with pytest.raises(CompositionError, match=re.escape(words)):
        sizes_of(check_form(split), LAYERS, 2, "Mesh(pp=2) has pp=2")
