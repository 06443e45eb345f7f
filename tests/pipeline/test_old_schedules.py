"""Schedules as data: complete, in order, bounded in memory, and free of deadlock for any number of microbatches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par import ScheduleError
from functional_par.pipeline.old_schedules import Action, afab, make_schedule, one_f_one_b, schedule_names

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 13)]
names = st.sampled_from(["afab", "1f1b"])
stages, microbatches = st.integers(1, 12), st.integers(1, 40)


def simulate(schedule):
    """Run the rows as ranks do: an action waits for the activation or cotangent of its neighbour, sends never wait, and
    what arrives is taken in the order it was sent. Returns the time at which each action started, all actions taking one
    unit; raises when nobody can go on."""
    time = [0] * len(schedule)
    at = [0] * len(schedule)
    sent = {}  # (from stage, to stage): [(microbatch, time)]
    started = {}
    while any(i < len(row) for i, row in zip(at, schedule, strict=True)):
        moved = False
        for stage, row in enumerate(schedule):
            if at[stage] == len(row):
                continue
            action = row[at[stage]]
            source = stage - 1 if action.kind == "F" else stage + 1
            ready = 0
            if 0 <= source < len(schedule):
                queue = sent.get((source, stage), [])
                if not queue:
                    continue
                microbatch, ready = queue.pop(0)
                assert microbatch == action.microbatch, "a message was taken for another microbatch's"
            elif action.kind == "B":
                ready = started["F", stage, action.microbatch] + 1
            start = max(time[stage], ready)
            started[action.kind, stage, action.microbatch] = start
            time[stage] = start + 1
            to = stage + 1 if action.kind == "F" else stage - 1
            if 0 <= to < len(schedule):
                sent.setdefault((stage, to), []).append((action.microbatch, time[stage]))
            at[stage] += 1
            moved = True
        assert moved, f"deadlock at {at}"
    assert not any(sent.values()), "a message that nobody takes"
    return started


def in_flight(row):
    """The largest number of microbatches that have gone forward and not backward."""
    now = most = 0
    for action in row:
        now += 1 if action.kind == "F" else -1
        most = max(most, now)
    return most


@given(names, stages, microbatches)
def test_every_stage_runs_each_microbatch_forward_and_backward_once(name, p, m):
    for stage, row in enumerate(make_schedule(name, p, m)):
        assert sorted((a.kind, a.microbatch) for a in row) == sorted((k, i) for k in "BF" for i in range(m))
        assert all(action.stage == stage for action in row)


@given(names, stages, microbatches)
def test_forwards_and_backwards_are_each_in_order_and_no_backward_precedes_its_forward(name, p, m):
    for row in make_schedule(name, p, m):
        for kind in "FB":
            assert [a.microbatch for a in row if a.kind == kind] == list(range(m))
        for i in range(m):
            assert row.index(Action("F", row[0].stage, i)) < row.index(Action("B", row[0].stage, i))


@given(stages, microbatches)
def test_1f1b_keeps_at_most_as_many_microbatches_as_stages_follow(p, m):
    for stage, row in enumerate(one_f_one_b(p, m)):
        assert in_flight(row) == min(m, p - stage)


@given(stages, microbatches)
def test_afab_keeps_them_all(p, m):
    assert all(in_flight(row) == m for row in afab(p, m))


@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_no_schedule_deadlocks_and_every_message_meets_its_microbatch(name):
    for p, m in SIZES:
        assert len(simulate(make_schedule(name, p, m))) == 2 * p * m


@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_the_bubble_is_that_of_the_formula(name):
    for p, m in SIZES:
        started = simulate(make_schedule(name, p, m))
        # 2m units of work a stage, of 2(m + p - 1) in all: a bubble of (p - 1) / (m + p - 1).
        assert max(started.values()) + 1 == 2 * (m + p - 1)


def test_the_simulation_sees_a_deadlock_and_a_message_out_of_order():
    f, b = (lambda s, i: Action("F", s, i)), (lambda s, i: Action("B", s, i))
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(((f(0, 0), b(0, 0), f(0, 1), b(0, 1)), (f(1, 0), f(1, 1), b(1, 0), b(1, 1))))
    with pytest.raises(AssertionError, match="another microbatch"):
        simulate(((f(0, 0), f(0, 1), b(0, 0), b(0, 1)), (f(1, 1), f(1, 0), b(1, 0), b(1, 1))))


def test_a_row_reads_like_a_picture():
    assert [" ".join(map(str, row)) for row in one_f_one_b(3, 2)] == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_an_unknown_schedule_is_refused_with_those_there_are():
    assert schedule_names() == ("afab", "1f1b")
    with pytest.raises(ScheduleError, match=r"schedule 'zb': it is one of afab, 1f1b\."):
        make_schedule("zb", 2, 2)
