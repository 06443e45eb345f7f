"""A measured timeline as a schedule: its order, its copies on other axes of the mesh, and what its actions cost."""

import pytest

from functional_par.errors import ScheduleError
from functional_par.report.replay import costs, replay, spread

from .timelines import TWO, timeline


def test_a_timeline_has_the_schedule_that_it_ran():
    found = replay(TWO, "1f1b")
    assert str(found.schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert (found.homes, found.schedule.name) == ((0, 1), "1f1b")


def test_copies_are_one_rank_of_the_schedule_and_idle_ranks_none():
    copies = timeline(5, "0:0F0:0:1 1:0F0:0:3 2:1F0:3:4 3:1F0:3:4")
    found = replay(copies, "")
    assert (found.homes, found.schedule.ranks) == ((0, 0, 1, 1, None), 2)
    assert found.costs.forward == (2.0, 1.0)
    assert spread(found, [7, 8]) == [7, 7, 8, 8, 0]


def test_copies_that_differ_are_no_schedule():
    with pytest.raises(ScheduleError, match="rank 1 and rank 0 ran the same stages, 0, in another order"):
        replay(timeline(2, "0:0F0:0:1 0:0F1:1:2 1:0F1:0:1 1:0F0:1:2"), "")
    with pytest.raises(ScheduleError, match="stage 0 is on the ranks 0, 1"):
        replay(timeline(2, "0:0F0:0:1 1:0F1:0:1 1:1F1:1:2"), "")


@pytest.mark.parametrize(
    ("backwards", "expected"),
    [
        ("0:0B0:1:4", (1.5, 1.5)),
        ("0:0I0:1:2 0:0W0:2:4", (1.0, 2.0)),
        ("0:0B0:1:4 0:0I1:4:5", (1.0, 2.0)),
        ("0:0B0:1:4 0:0W1:4:5", (2.0, 1.0)),
        ("0:0B0:1:2 0:0W1:4:7", (0.0, 3.0)),
        ("0:1F0:1:2", (0.0, 0.0)),
    ],
)
def test_a_backward_is_shared_out_between_its_parts(backwards, expected):
    found = costs(timeline(1, f"0:0F0:0:1 {backwards}"), 1)
    assert (found.input_backward[0], found.weight_backward[0]) == expected
