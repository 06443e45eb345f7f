"""A real run, on a clock on which every action takes the time it is given, is the simulation."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_par as fp
from functional_par import Mesh
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.routes import routes
from functional_par.pipeline.schedules import chunks_of
from functional_par.pipeline.simulate import simulate
from functional_par.testing.strategies import schedules
from functional_par.testing.virtual_clock import Stamps, VirtualRecording, VirtualWorld

from ..oracle import token_batch
from ..properties.examples import few
from .models import VOCAB, skipping


def run(program, pp, microbatches, costs):
    """The spans of every rank, on the virtual clock."""
    stamps = Stamps()
    batch = token_batch(VOCAB, microbatches, 3)

    def main(world):
        recording = VirtualRecording(costs)
        step = program.step(VirtualWorld(world, recording, stamps), fp.optim.sgd(lr=0.1), engine="tape")
        step(step.init(0), batch, recording)
        return recording.spans

    return fp.run(main, Mesh(pp=pp), backend="threads", timeout=20.0)


@st.composite
def cases(draw):
    pp = draw(st.integers(1, 4))
    name, chunks = draw(schedules())
    stages = pp * chunks_of(name, chunks)
    each = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    costs = Costs(draw(each), draw(each), draw(each), draw(st.integers(0, 3)))
    return pp, name, chunks, draw(st.integers(1, 6)), costs


@few(10, 0.5)
@given(cases())
def test_every_action_of_a_real_run_starts_and_ends_when_the_simulation_says(case):
    pp, name, chunks, microbatches, costs = case
    program = fp.compose(fp.stage_pp(name, microbatches, chunks=chunks))(skipping(max(7, pp * chunks_of(name, chunks))))
    plan = program.plan(Mesh(pp=pp))
    expected = simulate(plan.timetable, costs, routes(plan, plan.trace()).edges).timeline
    for rank, spans in enumerate(run(program, pp, microbatches, costs)):
        assert spans == [(s.action, s.start, s.end) for s in expected.spans if s.rank == rank]


def test_the_measured_bubble_is_that_of_the_formula():
    for pp in (2, 3, 4):
        for name, chunks in (("afab", None), ("1f1b", None), ("interleaved", 2)):
            m, v = 2 * pp, chunks or 1
            program = fp.compose(fp.stage_pp(name, m, chunks=chunks))(skipping(8))
            ranks = run(program, pp, m, Costs(1, 1, 1, 0))
            makespan = max(end for spans in ranks for _, _, end in spans)
            busy = sum(end - start for spans in ranks for _, start, end in spans)
            assert 1 - Fraction(busy, pp * makespan) == Fraction(pp - 1, v * m + pp - 1)


def test_a_recording_of_real_times_has_every_action_once_in_order_on_one_clock():
    program = fp.compose(fp.stage_pp("zbv", 3))(skipping(7))

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=0.1))
        recording = Recording(times=True)
        step(step.init(0), token_batch(VOCAB, 3, 3), recording)
        return recording.timeline(world), recording.peak

    (timeline, peak), (other, _) = fp.run(main, Mesh(pp=2), backend="threads")
    assert timeline == other
    assert timeline.unit == "s"
    schedule = program.plan(Mesh(pp=2)).timetable
    assert peak == simulate(schedule).live[0]
    for rank, row in enumerate(schedule.rows):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert tuple(span.action for span in spans) == row
        assert all(a.end <= b.start for a, b in pairwise(spans))
        assert all(0 <= span.start <= span.end for span in spans)
    # What an action takes is sent while another runs, which began before, on whatever rank.
    starts = {span.action: span.start for span in timeline.spans}
    for action, start in starts.items():
        if action.kind == "F" and action.stage:
            assert starts[action._replace(stage=action.stage - 1)] < start


def test_clocks_that_differ_are_put_on_that_of_rank_0(monkeypatch):
    import threading

    import functional_par.pipeline.recording as module

    real = module.time.perf_counter

    class Clock:
        @staticmethod
        def perf_counter():
            name = threading.current_thread().name
            return real() + (1000.0 * int(name.split()[1]) if name.startswith("rank") else 0.0)

    monkeypatch.setattr(module, "time", Clock)
    program = fp.compose(fp.stage_pp("1f1b", 2, [1, 2, 4]))(skipping(7))

    def main(world):
        step = program.step(world, fp.optim.sgd(lr=0.1))
        recording = Recording(times=True)
        step(step.init(0), token_batch(VOCAB, 2, 3), recording)
        return recording.timeline(world)

    timeline = fp.run(main, Mesh(pp=3))[0]
    assert timeline.makespan < 100
    assert torch.tensor([span.start for span in timeline.spans]).min() == 0
