"""Schedules by name: complete and in order for any number of ranks, microbatches and chunks, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par import ScheduleError
from functional_par.pipeline.costs import Costs
from functional_par.pipeline.schedules import canonical, chunks_of, make_schedule, schedule_names
from functional_par.pipeline.simulate import simulate

NAMES = ("afab", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-1p", "zb-2p", "zbv", "interleaved-zb", "dualpipev")
CHUNKED = ("interleaved", "looped-bfs", "interleaved-zb")

names, ranks, microbatches, chunks = st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 20), st.integers(1, 3)


def make(name, p, m, v):
    return make_schedule(name, p, m, v if name in CHUNKED else None)


def test_these_are_the_schedules():
    assert schedule_names() == NAMES


@given(names, ranks, microbatches, chunks)
def test_every_stage_runs_every_microbatch_once_each_kind_in_order(name, p, m, v):
    made = make(name, p, m, v)
    assert (made.ranks, made.microbatches, made.name) == (p, m, name)
    assert made.stages == len(made.placement) == p * chunks_of(name, v if name in CHUNKED else None)
    for stage, rank in enumerate(made.placement):
        row = [action for action in made.rows[rank] if action.stage == stage]
        forwards, inputs, weights = ([a.microbatch for a in row if a.kind in kinds] for kinds in ("F", "BI", "BW"))
        assert forwards == inputs == weights == list(range(m))


@given(ranks, microbatches, chunks)
def test_backwards_are_whole_unless_the_schedule_splits_them(p, m, v):
    kinds = {name: {action.kind for row in make(name, p, m, v).rows for action in row} for name in NAMES}
    assert {name for name in NAMES if kinds[name] == set("FB")} >= {"afab", "1f1b", "interleaved", "looped-bfs"}
    assert {name for name in NAMES if kinds[name] == set("FIW")} >= {"zb-h1", "zbv", "interleaved-zb"}


@given(ranks, microbatches, st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=8, max_size=8))
def test_schedules_by_costs_keep_their_bound_and_more_room_is_not_slower(p, m, parts):
    costs = Costs(*(list(each) for each in zip(*parts[:p], strict=True)))
    one, two = (make_schedule(name, p, m, costs=costs) for name in ("zb-1p", "zb-2p"))
    times = [simulate(made, costs) for made in (one, two)]
    assert max(times[0].live) <= p
    assert max(times[1].live) <= max(1, 2 * p - 1)
    assert times[1].makespan <= times[0].makespan * 1.0101


def test_the_names_of_nanotron_and_torch_are_known_in_any_case():
    known = {
        "afab": "afab",
        "1F1B": "1f1b",
        "AllForwardAllBackwardPipelineEngine": "afab",
        "OneForwardOneBackwardPipelineEngine": "1f1b",
        "GPipe": "afab",
        "gpipe": "afab",
        "Interleaved1F1B": "interleaved",
        "LoopedBFS": "looped-bfs",
        "InterleavedZeroBubble": "interleaved-zb",
        "ZBVZeroBubble": "zbv",
        "DualPipeV": "dualpipev",
        "ScheduleGPipe": "afab",
        "Schedule1F1B": "1f1b",
        "ScheduleInterleaved1F1B": "interleaved",
        "ScheduleLoopedBFS": "looped-bfs",
        "ScheduleInterleavedZeroBubble": "interleaved-zb",
        "ScheduleZBVZeroBubble": "zbv",
        "ScheduleDualPipeV": "dualpipev",
        "zb_h1": "zb-h1",
        "LOOPED_BFS": "looped-bfs",
    }
    assert {name: canonical(name) for name in known} == known


@pytest.mark.parametrize("name", ["wave", "", None, 3])
def test_an_unknown_schedule_is_refused_with_those_there_are(name):
    with pytest.raises(
        ScheduleError,
        match=r"is unknown\. There are afab, 1f1b, .*dualpipev.* AllForward.*ZBVZeroBubble.* CSV file, or .* a function",
    ):
        make_schedule(name, 2, 2)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("interleaved_1f1b", "interleaved"),
        ("1f1b1", "1f1b"),
        ("zb", "zbv"),
        ("zb h1", "zb-h1"),
        ("GPipes", "afab"),
        ("dualpipe", "dualpipev"),
        (["1f1b"], "1f1b"),
    ],
)
def test_of_an_unknown_schedule_the_nearest_is_named(name, near):
    with pytest.raises(ScheduleError, match=rf"is unknown: did you mean '{near}'\? There are afab"):
        canonical(name)


def test_chunks_are_those_of_the_schedule_or_any_number():
    assert [chunks_of(name) for name in NAMES] == [1, 1, 2, 2, 1, 1, 1, 2, 2, 2]
    assert [chunks_of("interleaved", 5), chunks_of("1f1b", 1), chunks_of("zbv", 2)] == [5, 1, 2]
    with pytest.raises(
        ScheduleError, match=r"schedule zbv: chunks=3, but it has 2 stages on each rank\. Leave chunks out"
    ):
        chunks_of("ZBVZeroBubble", 3)
    with pytest.raises(
        ScheduleError, match=r"chunks=2, but it has 1 stage on each rank.* interleaved, looped-bfs, inter"
    ):
        make_schedule("1f1b", 2, 2, 2)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2"])
def test_numbers_below_one_are_refused(bad):
    for what, arguments in (("ranks", (bad, 2, 2)), ("microbatches", (2, bad, 2)), ("chunks", (2, 2, bad))):
        with pytest.raises(ScheduleError, match=f"schedule interleaved: {what}=.*: it is an integer of at least 1"):
            make_schedule("interleaved", *arguments)


def test_rows_read_like_pictures():
    assert str(make_schedule("1f1b", 3, 2)) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n2F0 2B0 2F1 2B1"
    assert str(make_schedule("zbv", 2, 2)) == (
        "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1\n1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1"
    )
