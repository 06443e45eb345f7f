"""The simulator: published bubbles and memory, exactly; and any schedule as a slow recursion has it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.greedy import greedy
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.schedules import make_schedule, schedule_names
from functional_par.pipeline.simulate import simulate

from .test_schedules import make

UNIT = Costs(1, 1, 1, 0)
ranks, microbatches = st.integers(1, 8), st.integers(1, 20)
times = st.integers(1, 9)


def bubble(found):
    """Idle share, exactly."""
    work = sum(span.end - span.start for span in found.timeline.spans)
    return 1 - Fraction(work) / (found.timeline.ranks * found.makespan)


@given(st.sampled_from(["afab", "1f1b"]), ranks, microbatches, times, times, times)
def test_the_bubble_of_afab_and_1f1b_is_that_of_the_formula(name, p, m, f, i, w):
    found = simulate(make_schedule(name, p, m), Costs(f, i, w, 0))
    assert bubble(found) == Fraction(p - 1, m + p - 1)
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@given(st.sampled_from(["interleaved", "looped-bfs"]), ranks, st.integers(1, 4), st.integers(1, 4), times, times, times)
def test_the_bubble_of_interleaved_is_that_of_the_formula_if_p_divides_m(name, p, groups, v, f, i, w):
    m = groups * p
    assert bubble(simulate(make_schedule(name, p, m, v), Costs(f, i, w, 0))) == Fraction(p - 1, v * m + p - 1)


@given(ranks, microbatches)
def test_1f1b_keeps_at_most_as_many_activations_as_ranks_follow_and_afab_all(p, m):
    assert simulate(make_schedule("1f1b", p, m)).live == tuple(min(m, p - rank) for rank in range(p))
    assert simulate(make_schedule("afab", p, m)).live == (m,) * p


def run(name, p, m, v=1):
    """Time beyond work and one fill of the pipeline, with unit costs, and the most that a rank keeps."""
    found = simulate(make(name, p, m, v), UNIT)
    work = sum(span.end - span.start for span in found.timeline.spans if span.rank == 0)
    return found.makespan - work - (p - 1), max(found.live)


def around(p):
    """Numbers of microbatches from p on."""
    return sorted({p, p + 1, p + 2, 2 * p - 1, 2 * p, 2 * p + 1} - {*range(p)})


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_zb_h1_takes_3m_plus_p_minus_1_from_m_equal_p_on_and_the_least_possible_before(p):
    """Before: the last microbatch goes p forwards and p backwards one after the other, and one weight-backward is left."""
    for m in [*range(1, p), *around(p)]:
        assert run("zb-h1", p, m) == (max(0, p - m), min(p, m))


@given(st.integers(1, 6), st.integers(0, 8), times, times, times)
def test_zb_h1_leaves_the_published_idle_time_if_weight_backwards_are_not_the_longest(p, more, f, i, w):
    w = min(f, i, w)
    found = simulate(make_schedule("zb-h1", p, p + more), Costs(f, i, w, 0))
    assert found.makespan == (p + more) * (f + i + w) + (p - 1) * (f + i - w)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_zbv_takes_6m_plus_p_minus_1_from_m_equal_p_on(p):
    for m in around(p):
        assert run("zbv", p, m) == (0, 2 * p)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6, 8])
def test_dual_pipe_v_takes_6m_plus_p_minus_1_from_m_equal_2p_on_and_keeps_2p_plus_1(p):
    for m in (2 * p, 2 * p + 1, 3 * p):
        beyond, live = run("dualpipev", p, m)
        assert beyond == 0
        assert live == min(2 * p + 1, 2 * m)
    assert all(run("dualpipev", p, m)[1] <= 2 * p + 1 for m in range(1, 2 * p))


@given(ranks, st.integers(0, 6), st.integers(1, 3))
def test_looped_bfs_has_the_bubble_of_interleaved_for_any_m_from_p_on(p, more, v):
    m = p + more
    assert bubble(simulate(make_schedule("looped-bfs", p, m, v), UNIT)) == Fraction(p - 1, v * m + p - 1)


SMALL = {2: [2], 3: [5, 2], 4: [8, 4, 2], 5: [11, 7, 4, 2], 6: [14, 10, 6, 4, 2], 8: [20, 16, 12, 8, 6, 4, 2]}


@pytest.mark.parametrize("p", SMALL)
def test_zbv_of_fewer_microbatches_than_ranks_takes_a_little_longer(p):
    """A single microbatch takes the least possible: 2p forwards, 2p backwards and one weight-backward."""
    assert [run("zbv", p, m)[0] for m in range(1, p)] == SMALL[p]
    assert SMALL[p][0] + 6 + p - 1 == 4 * p + 1


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 3))
def test_interleaved_zb_takes_3vm_plus_p_minus_1_if_p_divides_m_and_little_more_if_not(p, groups, v):
    assert run("interleaved-zb", p, groups * p, v) == (0, v * p)
    for more in range(1, min(p, 4)):
        beyond, live = run("interleaved-zb", p, groups * p + more, v)
        assert beyond <= 5
        assert live <= v * p


def test_zero_bubble_schedules_are_never_slower_than_1f1b():
    for p in range(1, 6):
        for m in range(1, 11):
            one = simulate(make_schedule("1f1b", p, m), UNIT).makespan
            assert simulate(make_schedule("zb-h1", p, m), UNIT).makespan <= one
            half = Costs(Fraction(1, 2), Fraction(1, 2), Fraction(1, 2), 0)
            assert simulate(make_schedule("zbv", p, m), half).makespan <= one


@given(st.sampled_from(schedule_names()), st.integers(1, 4), st.integers(1, 5), st.integers(1, 2), st.data())
def test_any_timeline_is_that_of_a_slow_recursion(name, p, m, v, data):
    made = make(name, p, m, v)
    each = st.lists(times, min_size=made.stages, max_size=made.stages)
    f, i, w, hop = data.draw(each), data.draw(each), data.draw(each), data.draw(st.integers(0, 5))
    home = {action: (rank, at) for rank, row in enumerate(made.rows) for at, action in enumerate(row)}
    long = {"F": lambda s: f[s], "I": lambda s: i[s], "W": lambda s: w[s], "B": lambda s: i[s] + w[s]}

    @cache
    def end(action):
        rank, at = home[action]
        after = [end(made.rows[rank][at - 1])] if at else [0]
        for other in home:
            step = 1 if action.kind == "F" else -1
            same_way = (action.kind == "F") == (other.kind == "F") and "W" not in (action.kind, other.kind)
            if same_way and other.microbatch == action.microbatch and other.stage == action.stage - step:
                after.append(end(other) + hop * (home[other][0] != rank))
        return max(after) + long[action.kind](action.stage)

    spans = simulate(made, Costs(f, i, w, hop)).timeline.spans
    assert {span.action: span.end for span in spans} == {action: end(action) for action in home}
    assert [(span.rank, span.action) for span in spans] == [(r, a) for r, row in enumerate(made.rows) for a in row]
    assert all(span.end - span.start == long[span.action.kind](span.action.stage) for span in spans)


def test_bytes_are_those_of_the_stages_that_are_alive():
    made = Schedule.of("mine", [["0F0", "1F0", "0F1", "1B0", "0B0", "1F1", "1B1", "0B1"]])
    assert simulate(made, activation_bytes=10).live_bytes == (30,)
    assert simulate(made, activation_bytes=[100, 1]).live_bytes == (201,)
    assert simulate(made).live_bytes is None
    with pytest.raises(ScheduleError, match=r"activation_bytes=\[1\] has 1 numbers for 2 stages"):
        simulate(made, activation_bytes=[1])


def test_what_a_stage_keeps_is_alive_until_its_weight_backward_ends():
    late = Schedule.of("late", [["0F0", "0I0", "0F1", "0I1", "0W0", "0F2", "0I2", "0W1", "0W2"]])
    assert simulate(late, activation_bytes=7).live_bytes == (14,)
    assert (simulate(late).live, simulate(Schedule.of("whole", [["0F0", "0B0", "0F1", "0B1"]])).live) == ((2,), (1,))


def test_stages_of_one_rank_hand_over_at_once():
    assert simulate(make_schedule("zbv", 1, 3), Costs(1, 1, 1, 100)).makespan == 18
    down_and_up = simulate(make_schedule("zbv", 2, 1), Costs(1, 1, 1, 100))
    assert down_and_up.makespan == 4 + 4 + 1 + 4 * 100  # over each of the two gaps, forwards and back


def test_forwards_alone_are_simulated():
    found = simulate(make_schedule("1f1b", 3, 4).forward_only, UNIT)
    assert (found.makespan, found.live) == (4 + 2, (1, 1, 1))


def test_a_skip_is_waited_for():
    rows = [["0F0", "0B0"], ["1F0", "1B0"], ["2F0", "2B0"]]
    found = simulate(Schedule.of("mine", rows), Costs(1, 1, 1, 10), ((0, 1), (0, 2)))
    assert found.makespan == 1 + 10 + 1 + 2 + 10 + 2


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", None, True, [1, -1]])
def test_costs_that_are_no_times_are_refused(bad):
    with pytest.raises(ScheduleError, match=r"Costs\(forward=.*is no time.*or one for each stage"):
        Costs(forward=bad)


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScheduleError, match=r"Costs\(weight_backward=\[1, 2, 3\]\): 3 numbers for 2 stages"):
        simulate(make_schedule("1f1b", 2, 2), Costs(weight_backward=[1, 2, 3]))
    with pytest.raises(ScheduleError, match=r"Costs\(transfer=\[1, 2\]\): .* is no time"):
        Costs(transfer=[1, 2])


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.data())
def test_greedy_keeps_its_bounds_for_any_costs(p, m, spare, pending, data):
    placement = (*range(p), *reversed(range(p)))
    each = st.lists(times, min_size=2 * p, max_size=2 * p)
    costs = Costs(data.draw(each), data.draw(each), data.draw(each), data.draw(st.integers(0, 4)))
    made = greedy(placement, m, costs, live=1 + spare, pending=pending)
    assert max(simulate(made, costs).live) <= 1 + spare
    for row in made.rows:
        owed = [sum((a.kind == "I") - (a.kind == "W") for a in row[:n]) for n in range(len(row) + 1)]
        assert max(owed) <= pending


def test_greedy_refuses_bounds_with_which_nothing_runs():
    with pytest.raises(ScheduleError, match="rank 1 may keep 1 activations but has 2 stages"):
        greedy((0, 1, 1, 0, 0)[:3], 2, live=1)
    with pytest.raises(ScheduleError, match="pending=0: a rank puts off at least 1 weight-backward"):
        greedy((0, 1), 2, pending=0)
