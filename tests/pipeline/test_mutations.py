"""The verifier against a model that runs schedules: it never passes one that hangs or computes wrongly, and never refuses
one that runs right."""

from __future__ import annotations

from random import Random

import pytest

from functional_par import ScheduleError
from functional_par.pipeline.schedule import chain
from functional_par.pipeline.verify import verify

from .model import runs_right
from .mutate import mutant
from .test_schedules import NAMES, make


def passes(schedule, edges, stages, microbatches):
    try:
        verify(schedule, edges, schedule.ranks, stages, microbatches)
    except ScheduleError:
        return False
    return True


def check(seed, number):
    """Returns how many of the mutants run right."""
    rng, right = Random(seed), 0
    for _ in range(number):
        schedule, edges, stages, m = mutant(rng)
        runs = runs_right(schedule.rows, stages, m, edges)
        right += runs
        assert passes(schedule, edges, stages, m) == runs, f"runs right: {runs}\n{edges}\n{schedule}"
    return right


@pytest.mark.parametrize("seed", range(4))
def test_the_verifier_passes_just_the_mutants_that_run_right(seed):
    assert 250 < check(seed, 2500) < 1250


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(100, 110))
def test_the_verifier_passes_just_the_mutants_that_run_right_of_100000(seed):
    assert 1000 < check(seed, 10000) < 5000


def test_the_model_runs_what_is_made_here_and_sees_each_fault():
    for name in NAMES:
        made = make(name, 3, 4, 2)
        assert runs_right(made.rows, made.stages, 4, chain(made.stages))
        assert not runs_right(made.rows, made.stages, 5, chain(made.stages))
        assert not runs_right(made.rows, made.stages + 1, 4, chain(made.stages + 1))
    two = [[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "B", 0)]]
    assert runs_right(two, 2, 1, ((0, 1),))
    for rank, row in enumerate(two):
        assert not runs_right([row[::-1] if r == rank else other for r, other in enumerate(two)], 2, 1, ((0, 1),))
        assert not runs_right([row * 2 if r == rank else other for r, other in enumerate(two)], 2, 1, ((0, 1),))
    assert not runs_right([two[0][:1], two[1][:1]], 2, 1, ((0, 1),))
