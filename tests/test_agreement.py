"""Ranks that would not train the same model are told so before they start."""

from __future__ import annotations

import re

import pytest

import functional_par as fp
from functional_par import Mesh, MismatchError

from .toys import small_gpt

MODEL = small_gpt(blocks=4)


def built(differ, mesh=None):
    """Build a step on two pipeline ranks (or ``mesh``), whose programs differ as the function of the rank says."""

    def main(world):
        differ(world.rank).step(world, fp.optim.adamw(lr=1e-3))

    fp.run(main, mesh or Mesh(pp=2), timeout=10.0)


def staged(*args, **kwargs):
    return fp.compose(fp.stage_pp(*args, **kwargs), fp.dp_reduce(), fp.shard_tp())(MODEL)


def rows(ranks, microbatches):
    return fp.pipeline.make_schedule("zb-h1", ranks, microbatches).rows


def other_rows(ranks, microbatches):
    return fp.pipeline.make_schedule("1f1b", ranks, microbatches).rows


other_rows.__name__ = "rows"


@pytest.mark.parametrize(
    ("what", "programs"),
    [
        ("the stages", [staged("1f1b", 2, [3, 3]), staged("1f1b", 2, [4, 2])]),
        ("the stages", [staged("1f1b", 2), staged("zbv", 2)]),
        ("the schedule", [staged("1f1b", 2, [3, 3]), staged("zb-h1", 2, [3, 3])]),
        ("the schedule", [staged("1f1b", 2, [3, 3]), staged("1f1b", 3, [3, 3])]),
        ("the schedule", [staged(rows, 2, [3, 3]), staged(other_rows, 2, [3, 3])]),
        (
            "the leaves",
            [
                staged("1f1b", 2, [3, 3]),
                fp.compose(fp.tie("head.weight", "embed.weight"), fp.stage_pp("1f1b", 2, [3, 3]))(MODEL),
            ],
        ),
        (
            r"what is computed again \(remat\)",
            [fp.compose(fp.stage_pp("1f1b", 2, [3, 3]), fp.remat(policy))(MODEL) for policy in ("full", "selective")],
        ),
    ],
    ids=["split", "chunks", "name", "microbatches", "own rows", "ties", "remat"],
)
def test_processes_that_have_made_different_plans_are_told_what_differs(what, programs):
    message = rf"rank \d has another plan than rank \d: they differ in {what}.*Every process makes the same program"
    with pytest.raises(MismatchError, match=message):
        built(lambda rank: programs[rank])


def test_ranks_with_equal_plans_agree():
    for mesh in (Mesh(), Mesh(pp=2, dp=2), Mesh(tp=2)):
        built(lambda rank: staged("1f1b", 2), mesh)


def test_the_stages_are_shown_as_they_are_on_the_rank_that_speaks():
    programs = [staged("1f1b", 2, [3, 3]), staged("1f1b", 2, [4, 2])]
    shown = "rank 0: embed block0 block1 | rank 1: block2 block3 head"
    with pytest.raises(MismatchError) as caught:
        built(lambda rank: programs[rank])
    assert re.search(rf"{re.escape(shown)}|rank 0: embed block0 block1 block2 \|", str(caught.value))
