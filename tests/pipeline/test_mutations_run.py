"""Schedules with a random fault, run on real ranks: the verifier passes just those that end and give the gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch

import functional_par as fp
from functional_par import Mesh, ScheduleError
from functional_par.accumulate import Memory
from functional_par.pipeline import greedy, verify
from functional_par.pipeline.buffers import Buffers
from functional_par.pipeline.execute import Executor
from functional_par.pipeline.messages import tasks
from functional_par.pipeline.part import make_part
from functional_par.pipeline.routes import routes
from functional_par.reduce import Gradients
from functional_par.run_par import RunPar
from functional_par.tree import flatten
from functional_par.vjp import engine

from ..oracle import gradients, token_batch
from .models import VOCAB, skipping
from .mutate import mutant

CPU = torch.device("cpu")
SEQ, ROWS = 3, 2


@cache
def prepared(placement, microbatches):
    """A plan whose stages lie so, its parameters, a batch, and the gradient of its loss."""
    model = skipping(max(7, len(placement)))
    plan = fp.compose(fp.stage_pp(greedy(placement, microbatches), microbatches))(model).plan(
        Mesh(pp=max(placement) + 1)
    )
    params = flatten(model.init(0, torch.float64))
    batch = token_batch(VOCAB, ROWS * microbatches, SEQ)
    shapes = {name: ((ROWS, SEQ), x.dtype) for name, x in batch.items()}
    return plan, params, batch, shapes, gradients(model, params, batch)[1], int(model.count_terms(batch))


def runs_right(schedule, stages, microbatches):
    """Whether real ranks end, have nothing left, have done nothing twice, and have computed the gradient. Nothing is
    verified before."""
    try:
        placement = schedule.placement
    except ScheduleError:
        return False, None
    schedule = replace(schedule, rows=schedule.rows[: max(placement) + 1])  # ranks that have nothing to do are left out
    actions = [action for row in schedule.rows for action in row]
    if schedule.stages != stages or len(actions) > len(set(actions)):
        return False, None
    plan, params, batch, shapes, expected, count = prepared(placement, microbatches)
    edges = routes(plan, plan.trace()).edges

    def main(world):
        part = make_part(plan, world, shapes, torch.float64)
        object.__setattr__(part, "tasks", tasks(schedule, edges)[world.rank])
        grads = Gradients(plan, world.rank, Memory(torch.float64, CPU))
        micro = lambda i: {name: x[ROWS * i : ROWS * (i + 1)] for name, x in batch.items()}  # noqa: E731
        executor = Executor(
            part,
            world,
            Buffers(CPU, poison=True),
            engine("tape"),
            lambda i: RunPar(batch=micro(i)),
            {path: params[path] for path in plan.held(world.rank)},
            torch.tensor(1.0 / count, dtype=torch.float64),
            grads,
        )
        losses = executor.run()
        grads.complete()
        return grads.leaves, bool(executor.live or executor._posted or executor._held), len(losses)

    try:
        ranks = fp.run(main, Mesh(pp=schedule.ranks), backend="threads", timeout=60.0)
    except Exception:
        return False, edges
    found = {path: grad for leaves, _, _ in ranks for path, grad in leaves.items()}
    equal = all(torch.allclose(found[path], grad, rtol=0, atol=1e-10) for path, grad in expected.items())
    losses = sum(n for _, _, n in ranks) == microbatches
    return equal and losses and not any(left for _, left, _ in ranks), edges


def check(seed, number):
    rng, right = Random(seed), 0
    for _ in range(number):
        schedule, _, stages, microbatches = mutant(rng)
        runs, edges = runs_right(schedule, stages, microbatches)
        right += runs
        try:
            verify(schedule, edges, stages=stages, microbatches=microbatches)
            passed = True
        except ScheduleError:
            passed = False
        assert passed == runs, f"seed {seed}: passed {passed}, runs right {runs}\n{schedule}"
    return right


@pytest.mark.parametrize("seed", [0, 1])
def test_the_verifier_passes_just_the_mutants_that_real_ranks_run_right(seed):
    assert check(seed, 60) > 6


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10, 20))
def test_the_verifier_passes_just_the_mutants_of_many_that_real_ranks_run_right(seed):
    check(seed, 1000)
