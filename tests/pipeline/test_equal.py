"""Every schedule, for any number of ranks, chunks and microbatches, is the gradient of one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_par as fp
from functional_par import Mesh
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.schedules import chunks_of, schedule_names
from functional_par.pipeline.simulate import simulate
from functional_par.testing.strategies import schedules, splits
from functional_par.tree import flatten

from ..oracle import close, gradients, token_batch
from ..properties.examples import few
from .models import VOCAB, skipping, ties

SEQ, ROWS = 3, 2


@cache
def model_of(layers):
    return skipping(layers)


def trained(program, pp, batch, *, engine="tape", poison=False):
    """The gradients of one step, its loss, the loss of an evaluation, and the largest number of live activations a rank."""

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=1.0), dtype=torch.float64, engine=engine, poison=poison)
        state, recording, forwards = step.init(0), Recording(), Recording()
        before = step.evaluate(state, batch, forwards)
        moved, metrics = step(state, batch, recording)
        assert forwards.peak == 0
        return step.gather(moved), metrics, before, recording.peak

    weights, metrics, before, peaks = zip(*fp.run(main, Mesh(pp=pp), backend="threads", timeout=20.0), strict=True)
    assert all(other == metrics[0] for other in metrics)
    assert all(other == before[0] for other in before)
    initial = flatten(program.model.init(0, torch.float64))
    moved = flatten(weights[0])
    assert before[0]["tokens"] == metrics[0]["tokens"]
    return {p: x - moved[p] for p, x in initial.items()}, metrics[0]["loss"], before[0]["loss"], peaks


def check(pp, name, chunks, microbatches, tied, *, split=None, seed=0, **options):
    """One layout against one process, and its memory against the simulator."""
    layers = max(7, pp * chunks_of(name, chunks) + seed % 3)
    transforms = [fp.tie(*names) for names in tied] + [fp.stage_pp(name, microbatches, split, chunks)]
    program = fp.compose(*transforms)(model_of(layers))
    batch = token_batch(VOCAB, ROWS * microbatches, SEQ, seed=seed)
    params = flatten(program.model.init(0, torch.float64))
    loss, expected = gradients(program.model, params, batch)
    found, step_loss, before, peaks = trained(program, pp, batch, **options)
    close(torch.tensor(step_loss, dtype=torch.float64), loss, "loss")
    close(torch.tensor(before, dtype=torch.float64), loss, "loss of the evaluation")
    for path, grad in expected.items():
        close(found[path], grad, path)
    plan = program.plan(Mesh(pp=pp))
    assert peaks == simulate(plan.timetable).live
    return found


@st.composite
def layouts(draw):
    pp = draw(st.integers(1, 4))
    name, chunks = draw(schedules())
    layers = max(7, pp * chunks_of(name, chunks))
    tied = draw(st.lists(st.sampled_from(ties(layers)), max_size=1))
    split = draw(splits(layers, pp * chunks_of(name, chunks))) if pp > 1 else None
    return pp, name, chunks, draw(st.integers(1, 9)), tied, split


@few(15, 0.75)
@given(layouts(), st.sampled_from(["func", "tape"]), st.booleans())
def test_a_pipeline_is_the_gradient_of_one_process_with_any_schedule_ties_and_split(layout, engine, poison):
    pp, name, chunks, microbatches, tied, split = layout
    check(pp, name, chunks, microbatches, tied, split=split, engine=engine, poison=poison)


EVERY = [(name, chunks) for name in schedule_names() for chunks in (None, 1, 2, 3)]


@pytest.mark.deep
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), EVERY, ids=str)
def test_the_whole_table(pp, name, chunks):
    try:
        stages = pp * chunks_of(name, chunks)
    except fp.ScheduleError:
        return  # a schedule that has its own number of chunks
    for microbatches in range(1, 10):
        for seed, tied in enumerate([[], *([group] for group in ties(max(7, stages)))]):
            check(pp, name, chunks, microbatches, tied if seed % 3 == 0 else [], seed=seed, poison=bool(seed % 2))


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("zb-h1", None), ("zbv", None), ("interleaved", 2)])
def test_filling_unused_memory_with_nan_changes_no_bit(name, chunks):
    program = fp.compose(fp.tie("out", "table"), fp.stage_pp(name, 5, None, chunks))(model_of(8))
    batch = token_batch(VOCAB, 5 * ROWS, SEQ)
    clean, poisoned = (
        trained(program, 3 if chunks is None and name != "zbv" else 2, batch, poison=p) for p in (False, True)
    )
    assert clean[1:] == poisoned[1:]
    for path, grad in clean[0].items():
        assert torch.equal(grad, poisoned[0][path]), path


@pytest.mark.parametrize("pp", [2, 4])
def test_afab_and_1f1b_give_the_same_bits(pp):
    batch = token_batch(VOCAB, 6 * ROWS, SEQ)
    found = [trained(fp.compose(fp.stage_pp(name, 6))(model_of(7)), pp, batch) for name in ("afab", "1f1b")]
    assert found[0][1:3] == found[1][1:3]
    for path, grad in found[0][0].items():
        assert torch.equal(grad, found[1][0][path]), path
