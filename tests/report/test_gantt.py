"""The picture of a timeline in a terminal: every action where and as long as it is, the rest dots."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par.pipeline.costs import Costs
from functional_par.pipeline.schedule import Action
from functional_par.pipeline.schedules import make_schedule, schedule_names
from functional_par.pipeline.simulate import simulate
from functional_par.pipeline.timeline import Span, Timeline
from functional_par.report.gantt import gantt, legend

from .timelines import CHUNKS, TWO, timeline


def test_a_small_schedule_exactly():
    assert gantt(TWO).plain.splitlines() == [
        "rank 0  F0F1....B0--..B1--",
        "rank 1  ..F0B0--F1B1--....",
    ]
    assert legend(TWO) == "F forward, B backward; after it the microbatch"


def test_a_second_stage_of_a_rank_has_small_letters():
    assert gantt(CHUNKS).plain.splitlines() == [
        "rank 0  F0--....f0--....i0--w0--....B0------",
        "rank 1  ....F0--....f0b0....I0--W0--........",
    ]
    assert legend(CHUNKS) == (
        "F forward, B backward, I input-backward, W weight-backward; small letters: the second stage of the rank; "
        "after it the microbatch"
    )


def test_stages_are_named_where_a_rank_has_more_than_two():
    three = timeline(1, "0:0F0:0:1 0:1F0:1:2 0:2F10:2:3")
    assert gantt(three).plain == "rank 0  0F0-1F0-2F10"
    assert "before the letter the stage" in legend(three)


def test_costs_that_are_no_integers_are_drawn_to_scale():
    picture = timeline(1, "0:0F0:0.25:1.5 0:0B0:2.75:6.5")
    assert gantt(picture).plain == "rank 0  F0..B0----"


def test_a_narrow_terminal_gets_blocks_with_their_times_and_all_names():
    assert gantt(TWO, columns=17).plain.splitlines() == [
        "time 0 to 4",
        "rank 0  F0F1....",
        "rank 1  ..F0B0--",
        "",
        "time 4 to 8",
        "rank 0  B0--..B1",
        "rank 1  F1B1--..",
        "",
        "time 8 to 9",
        "rank 0  --",
        "rank 1  ..",
    ]
    assert gantt(TWO, columns=26).plain == gantt(TWO).plain


def pieces(text, ranks):
    """The rows, put together again from their blocks."""
    rows = [line for line in text.plain.splitlines() if line.startswith("rank")]
    return ["".join(row[8:] for row in rows[rank::ranks]) for rank in range(ranks)]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("columns", [30, 80])
def test_no_schedule_loses_an_action_however_narrow_the_terminal(name, columns):
    schedule = make_schedule(name, 4, 13)
    found = simulate(schedule).timeline
    text = gantt(found, columns)
    assert pieces(text, 4) == pieces(gantt(found), 4)
    assert max(map(len, text.plain.splitlines())) <= max(columns, len("rank 0  B12"), len("time 100 to 200"))
    if len(set(schedule.placement)) == schedule.stages:
        for row, drawn in zip(schedule.rows, pieces(text, 4), strict=True):
            assert re.findall(r"[FBIW]\d+", drawn) == [f"{a.kind}{a.microbatch}" for a in row]


def test_names_are_whole_where_every_cut_goes_through_one():
    schedule = make_schedule("zb-h1", 4, 20)
    found = simulate(schedule, Costs(1.3, 1.1, 0.9, 0.3)).timeline
    for columns in range(40, 60):
        text = gantt(found, columns)
        assert max(map(len, text.plain.splitlines())) <= columns
        for row, drawn in zip(schedule.rows, pieces(text, 4), strict=True):
            assert re.findall(r"[FIW]\d+", drawn) == [f"{a.kind}{a.microbatch}" for a in row]


def test_of_a_picture_of_very_many_blocks_it_is_said_how_many_actions_are_left_out():
    text = gantt(simulate(make_schedule("1f1b", 2, 500)).timeline, 80)
    [said] = [line for line in text.plain.splitlines() if "left out" in line]
    assert said == "time 70 to 1429: 1812 actions left out here; --output FILE.svg draws all"
    assert sum(len(re.findall(r"[FB]\d+", row)) for row in pieces(text, 2)) == 2000 - 1812


def test_what_is_too_short_for_its_name_or_for_a_place_is_counted():
    rows = [f"0:0F{at}:{2 * at}:{2 * at + 1}" for at in range(30)]
    noisy = timeline(1, " ".join([*rows, "0:0B0:60:60.3", "0:0B1:61:61.001"]))
    assert gantt(noisy).plain.endswith("F29...B..")
    assert legend(noisy).endswith(
        "; too short for their names, which are cut: 1 action; too short for a place, and left out: 1 action (--output "
        "FILE.json has all)"
    )
    assert "cut" not in legend(TWO)


def test_actions_of_next_to_no_time_do_not_stretch_the_picture():
    made = simulate(make_schedule("zb-h1", 2, 4), Costs(weight_backward=1e-3)).timeline
    assert pieces(gantt(made, 80), 2)[0].startswith("F0F1")
    assert legend(made, 80).endswith("too short for a place, and left out: 8 actions (--output FILE.json has all)")
    least = gantt(timeline(1, "0:0F0:0:5e-324 0:0B0:1:2 0:0B1:2:3")).plain
    assert least.endswith("B0B1")


def test_no_microbatch_is_shown_by_half_of_its_number():
    long = timeline(1, "0:0F10:0:1 0:0F100:1:2")
    assert pieces(gantt(long, columns=12), 1) == ["F10-F100"]
    assert gantt(timeline(1, "0:0F10:0:0.4 0:0B10:1:2", "s")).plain == "rank 0  F10.....B10----"


@pytest.mark.parametrize("columns", [1, 9, 20, 40])
def test_a_measured_picture_fits_whatever_the_noise(columns):
    noisy = timeline(1, "0:0F0:0:1 0:0F1:1:1.000001 0:0B0:2:4", unit="s")
    rows = [line for line in gantt(noisy, columns).plain.splitlines() if line.startswith("rank")]
    assert max(map(len, rows)) <= max(columns, len("rank 0  F0"))
    assert "too short for a place, and left out: 1 action" in legend(noisy)


def test_rows_have_the_names_that_they_are_given_and_idle_ranks_have_rows():
    idle = Timeline(2, TWO.spans[:1])
    assert gantt(idle, labels=["rank 0: pp 0"]).plain.splitlines() == ["rank 0: pp 0  F0", "rank 1        .."]


def test_a_timeline_without_spans_or_without_time_has_empty_rows():
    assert gantt(Timeline(1, ())).plain == "rank 0  "
    assert gantt(timeline(1, "0:0F0:1:1")).plain == "rank 0  "


def test_colours_repeat_the_kind_and_leave_the_letters():
    text = gantt(TWO, colored=True)
    assert text.plain.splitlines()[0] == "rank 0  F0F1....B0  ..B1  "
    assert {str(span.style) for span in text.spans} == {"black on blue", "black on green"}


@given(st.lists(st.tuples(st.sampled_from("FBIW"), st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=8))
def test_every_picture_is_a_rectangle_and_each_action_is_in_it_or_counted(parts):
    now, spans = 0.0, []
    for microbatch, (kind, wait, work) in enumerate(parts):
        spans.append(Span(microbatch % 2, Action(microbatch % 2, kind, microbatch), now + wait, now + wait + work))
        now += wait + work
    for columns in (None, 30):
        drawn, said = gantt(Timeline(2, tuple(spans)), columns), legend(Timeline(2, tuple(spans)), columns)
        first, second = pieces(drawn, 2)
        assert "time" in drawn.plain or len(first) == len(second)
        assert max(map(len, (line for line in drawn.plain.splitlines() if "rank" in line))) <= (columns or 1008)
        gone = [re.search(r"(\d+) actions? left out here", drawn.plain), re.search(r"left out: (\d+) action", said)]
        assert len(re.findall("[FBIW]", first + second)) + sum(int(found[1]) for found in gone if found) == len(parts)
