"""The picture of a timeline in a terminal: every action where and as long as it is, the rest dots."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_par.pipeline.schedule import Action
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


def test_a_narrow_terminal_scales_the_picture_and_says_so():
    lines = gantt(TWO, columns=17).plain.splitlines()
    assert lines == ["rank 0  FF..B0.B1", "rank 1  .FB0FB1.."]
    assert legend(TWO, columns=17).endswith("; scaled, names that do not fit are cut")
    assert not legend(TWO, columns=26).endswith("cut")
    assert legend(timeline(1, "0:0F0:0:1 0:0B0:900:901")).endswith("cut")


def test_no_microbatch_is_shown_by_half_of_its_number():
    long = timeline(1, "0:0F10:0:1 0:0F100:1:2")
    assert gantt(long, columns=12).plain == "rank 0  F-F-"


@pytest.mark.parametrize("columns", [1, 9, 20, 40])
def test_a_measured_picture_fits_whatever_the_noise(columns):
    noisy = timeline(1, "0:0F0:0:1 0:0F1:1:1.000001 0:0B0:2:4", unit="s")
    assert len(gantt(noisy, columns).plain) <= max(columns, len("rank 0  ") + 1)


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
def test_every_picture_is_a_rectangle_within_its_width(parts):
    now, spans = 0.0, []
    for microbatch, (kind, wait, work) in enumerate(parts):
        spans.append(Span(microbatch % 2, Action(microbatch % 2, kind, microbatch), now + wait, now + wait + work))
        now += wait + work
    for columns in (None, 30):
        first, second = gantt(Timeline(2, tuple(spans)), columns).plain.splitlines()
        assert len(first) == len(second) <= (columns or 1009)
