"""The verifier: every schedule made here is proved, and each fault has an error that names it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par import ScheduleError
from functional_par.pipeline.messages import Message, Task
from functional_par.pipeline.schedule import Action, Schedule
from functional_par.pipeline.schedules import make_schedule, schedule_names
from functional_par.pipeline.token_game import play
from functional_par.pipeline.verify import verify

from .test_schedules import CHUNKED, make

names = st.sampled_from(schedule_names())


def refused(rows, match, **options):
    with pytest.raises(ScheduleError, match=match):
        verify(Schedule.of("mine", [row.split() for row in rows]), **options)


@given(names, st.integers(1, 8), st.integers(1, 20), st.integers(1, 3))
def test_every_schedule_is_proved_for_any_number_of_ranks_microbatches_and_chunks(name, p, m, v):
    made = make(name, p, m, v)
    proof = verify(made, ranks=p, stages=made.stages, microbatches=m)
    assert proof.live == verify(made, most_live=proof.live).live
    hops = sum(made.placement[s] != made.placement[s + 1] for s in range(made.stages - 1))
    assert sum(proof.messages.values()) == 2 * m * hops
    assert sorted(task.action for _, task in proof.order) == sorted(a for row in made.rows for a in row)
    assert set(verify(made.forward_only, training=False).live) == {1}


@given(names, st.integers(1, 5), st.integers(1, 8), st.integers(1, 2))
def test_skips_between_any_stages_are_proved_too(name, p, m, v):
    made = make(name, p, m, v)
    skips = tuple((a, b) for a in range(made.stages) for b in range(a + 1, made.stages))
    assert sum(verify(made, skips).messages.values()) == 2 * m * sum(
        made.placement[a] != made.placement[b] for a, b in skips
    )


@pytest.mark.parametrize("name", CHUNKED)
def test_sizes_that_ranks_do_not_divide_are_proved(name):
    for p, m in ((4, 1), (4, 3), (4, 5), (4, 6), (4, 7), (8, 9), (7, 20)):
        verify(make_schedule(name, p, m, 2), ranks=p, stages=2 * p, microbatches=m)


def test_a_schedule_of_many_ranks_is_proved_in_time_linear_in_its_actions():
    assert verify(make_schedule("1f1b", 64, 64)).live == tuple(range(64, 0, -1))


def test_ranks_without_stages_have_empty_rows():
    proof = verify(Schedule.of("idle", [[], ["0F0", "0B0"], [], ["1F0", "1B0"], []]), ranks=5)
    assert proof.live == (0, 1, 0, 1, 0)
    assert proof.messages == {(1, 3): 1, (3, 1): 1}


def test_an_action_that_is_missing_is_named_with_its_rank():
    refused(["0B0", "1F0 1B0"], "mine: 0F0, the forward of microbatch 0 on stage 0, is missing on rank 0", stages=2)
    refused(
        ["0F0 0B0", "1F0"], r"1B0, the backward of microbatch 0 on stage 1, is missing \(or 1I0 and 1W0\) on rank 1"
    )
    refused(["0F0 0I0"], r"0W0, the weight-backward of microbatch 0 on stage 0, is missing \(0I0 is there\) on rank 0")
    refused(["0F0 0W0"], r"0I0, the input-backward of microbatch 0 on stage 0, is missing \(0W0 is there\) on rank 0")
    refused(["0F0 0B0"], "0F1, the forward of microbatch 1 on stage 0, is missing on rank 0", microbatches=2)
    refused(["0F0 0B0"], "1F0, .* is missing and no rank has an action of stage 1, and 1 more", stages=2)


def test_of_many_that_are_missing_the_first_is_named_and_the_others_are_counted():
    refused(["0F0 0B0 0F2", "1F0 1B0 1F2 1I2"], r"mine: 0F1, .* is missing on rank 0, and 5 more\.$")
    refused(["0F0 0B0 0F1"], r"mine: 0B1, .* is missing \(or 0I1 and 0W1\) on rank 0\.$")
    refused(["0F0 0B0 0I0 0F1"], r"mine: there are both 0B0 and 0I0 \(B is I and W in one\) on rank 0\.$")


def test_what_is_there_twice_or_too_much_is_named_with_its_places():
    refused(
        ["0F0 0F0 0B0"],
        "0F0, the forward .*, is there twice: as action 0 of rank 0 and as action 1 of rank 0 \\(counted from 0",
    )
    refused(["0F0 0B0", "0F0 0B0"], "is there twice: as action 0 of rank 0 and as action 0 of rank 1")
    refused(["0F0 0B0 0I0"], r"there are both 0B0 and 0I0 \(B is I and W in one\) on rank 0")
    refused(["0F0 0B0"], "there is 0B0, but this schedule is of forwards only, and it is on rank 0", training=False)


def test_a_stage_on_two_ranks_is_refused():
    refused(["0F0 0F1 0B0", "0B1"], "stage 0 is on the ranks 0, 1")
    refused(["0F0 0B0", "2F0 2B0"], "stage 1 has no action on any rank")


def test_the_order_on_a_rank_is_checked():
    refused(["0B0 0F0"], r"rank 0 runs 0B0 \(action 0, counted from 0\) before 0F0 \(action 1\), which it needs")
    refused(["0F0 0W0 0I0"], r"rank 0 runs 0W0 \(action 1, counted from 0\) before 0I0 \(action 2\), which it needs")


def test_a_deadlock_shows_who_waits_for_whom():
    refused(
        ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
        "mine never ends: rank 0 at 0B0 waits for gradients of microbatch 0 from stage 1, which rank 1 sends after 1B0; "
        "rank 1 at 1F1 waits for activations of microbatch 1 from stage 0, which rank 0 sends after 0F1",
    )
    refused(
        ["1F0 0F0 1B0 0B0"],
        "rank 0 at 1F0 waits for activations of microbatch 0 from stage 0, which it sends after 0F0",
    )


def test_a_rank_that_only_waits_for_a_ring_is_not_in_it():
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"]
    with pytest.raises(
        ScheduleError, match=r"ends: rank 1 at 1B0 waits for .* after 2B0; rank 2 at 2F1 .* after 1F1"
    ) as info:
        verify(Schedule.of("mine", [row.split() for row in rows]))
    assert "rank 0 at" not in str(info.value)


def test_wrong_rows_and_actions_are_refused():
    refused(["0F0 0B0"], "mine has 1 rows, but there are 2 ranks", ranks=2)
    refused(
        ["0F0 0B0", "1F0 1B0"], "action 0 of rank 1 .counted from 0. is 1F0. Stages are integers from 0 to 0", stages=1
    )
    refused(
        ["0F0 0B0 0F1 0B1"], "action 2 of rank 0 .counted from 0. is 0F1.* microbatches from 0 to 0", microbatches=1
    )
    refused(["", ""], "has no action on any of 2 ranks")
    for bad in (Action(-1, "F", 0), Action(0, "X", 0), Action(0, "F", 1.0), Action(True, "F", 0), "0F0", None):
        with pytest.raises(ScheduleError, match=r"action 1 of rank 0 \(counted from 0\) is .* kinds are F, B, I, W"):
            verify(Schedule("mine", ((Action(0, "F", 0), bad),)))


def test_the_bound_on_live_activations_names_where_it_is_exceeded():
    made = make_schedule("1f1b", 3, 5)
    assert verify(made, most_live=3).live == verify(made, most_live=[3, 2, 1]).live == (3, 2, 1)
    with pytest.raises(
        ScheduleError, match=r"rank 0 keeps 3 activations at 0F2 \(action 2, counted from 0\), more than 2"
    ):
        verify(made, most_live=2)
    with pytest.raises(
        ScheduleError, match=r"rank 1 keeps 2 activations at 1F1 \(action 1, counted from 0\), more than 1"
    ):
        verify(made, most_live=[3, 1, 1])
    with pytest.raises(ScheduleError, match=r"most_live=\[3, 2\] has 2 bounds for 3 ranks"):
        verify(made, most_live=[3, 2])


@pytest.mark.parametrize("edge", [(1, 0), (0, 0), (0, 2), (-1, 0), (0, 1)])
def test_an_edge_that_goes_back_or_nowhere_or_twice_is_refused(edge):
    with pytest.raises(ScheduleError, match=r"edge 1 from stage .*: each edge goes, once, from a stage to a later one"):
        verify(make_schedule("afab", 2, 1), ((0, 1), edge))


def test_ends_of_a_lane_that_disagree_are_refused():
    """Tasks made by hand: those that are derived agree."""
    first, second = (Message(0, 1, i, 0, 1) for i in range(2))
    f = [[Action(stage, "F", i) for i in range(2)] for stage in range(2)]
    sends = [Task(f[0][0], (), (), (first,)), Task(f[0][1], (), (), (second,))]
    crossed = [Task(f[1][0], (second,), (second,), ()), Task(f[1][1], (first,), (first,), ())]
    with pytest.raises(
        ScheduleError, match=r"message 0 from rank 0 to rank 1: one sends .*batch 0 .* receives .*batch 1 "
    ):
        list(play("mine", [sends, crossed]))
    with pytest.raises(
        ScheduleError, match=r"message 1 from rank 0 to rank 1: one sends .* the other receives nothing"
    ):
        list(play("mine", [sends, [Task(f[1][0], (first,), (first,), ())]]))
    with pytest.raises(
        ScheduleError, match=r"rank 1 at 1F0 waits for activations of microbatch 0 .* which nobody sends"
    ):
        list(play("mine", [[], [Task(f[1][0], (), (first,), ())]]))
