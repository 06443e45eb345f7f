"""Schedules in files: what is written is read again, by torch too, and a wrong cell is named."""

from __future__ import annotations

import csv

import pytest
from torch.distributed.pipelining.schedules import _Action

from functional_par import ScheduleError
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.schedule_file import read_schedule, write_schedule
from functional_par.pipeline.schedules import make_schedule, schedule_names


@pytest.mark.parametrize("name", schedule_names())
def test_what_is_written_is_read_again(name, tmp_path):
    made = make_schedule(name, 3, 4)
    write_schedule(made, tmp_path / "mine.csv")
    assert read_schedule(tmp_path / "mine.csv") == Schedule("mine.csv", made.rows)


def test_a_rank_without_stages_keeps_its_row_wherever_it_is(tmp_path):
    made = Schedule.of("idle.csv", [[], ["0F0", "0B0"], [], ["1F0", "1B0"], []])
    write_schedule(made, tmp_path / "idle.csv")
    assert read_schedule(str(tmp_path / "idle.csv")) == made


def test_torch_reads_what_is_written(tmp_path):
    made = make_schedule("zbv", 2, 3)
    write_schedule(made, tmp_path / "mine.csv")
    with (tmp_path / "mine.csv").open(newline="") as file:
        rows = [[str(_Action.from_str(cell)) for cell in row] for row in csv.reader(file)]
    assert rows == [list(map(str, row)) for row in made.rows]


def test_idle_cells_communication_and_overlaps_of_torch_are_read(tmp_path):
    """As ``_dump_csv`` writes them, with spaces and a mark of the encoding as spreadsheets do."""
    path = tmp_path / "torch.csv"
    path.write_text(
        "\ufeff0UNSHARD,0F0,0SEND_F0,, 0F1 ,0RECV_B0,0I0,0W0,0RESHARD,0REDUCE_GRAD,0B1\r\n"
        ",1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,\r\n\r\n\r\n",
        encoding="utf-8",
    )
    assert (
        read_schedule(path).rows
        == Schedule.of("", [["0F0", "0F1", "0I0", "0W0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]).rows
    )


WRONG = ("0X0", "F0", "0F", "0F0;1B0", "(0F0;0Q1)OVERLAP_F_B", "(0F0)", "-1F0", "0SEND0", f"{'9' * 5000}F0")


@pytest.mark.parametrize("cell", WRONG, ids=range(len(WRONG)))
def test_a_wrong_cell_is_named_with_its_row_and_column(cell, tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text(f"0F0,0B0\n1F0,,{cell}\n")
    with pytest.raises(
        ScheduleError, match=r"schedule file .*wrong\.csv, row 2, column 3 \(counted from 1; rank 1\): "
    ):
        read_schedule(path)


def test_a_wrong_cell_is_shown_once_and_not_at_length(tmp_path):
    path = tmp_path / "wrong.csv"
    path.write_text("0F0,0f0")
    with pytest.raises(ScheduleError, match=r"rank 0\): '0f0' is no action: write stage, kind and microbatch") as info:
        read_schedule(path)
    assert str(info.value).count("0f0") == 1
    path.write_text(f"{'9' * 5000}F0")
    with pytest.raises(ScheduleError, match=r"'9{59}\.\.\.: Exceeds the limit") as info:
        read_schedule(path)
    assert len(str(info.value)) < 400


@pytest.mark.parametrize(
    ("mark", "called"), [(";", "semicolons"), ("\t", "tabs"), (" ; ", "semicolons"), (" ", "spaces")]
)
def test_another_separator_is_seen(mark, called, tmp_path):
    path = tmp_path / "mine.csv"
    write_schedule(make_schedule("1f1b", 2, 9), path)
    path.write_text(path.read_text().replace(",", mark))
    with pytest.raises(ScheduleError, match=rf"row 1, .*: its cells are separated by {called}, as in '0F0") as info:
        read_schedule(path)
    assert str(info.value).endswith("Separate them by commas.")
    assert len(str(info.value)) < len(str(path)) + 180


@pytest.mark.parametrize("text", [None, b"\xff\xfe\x00", b"0F0," + b"0" * 200_000])
def test_a_file_that_cannot_be_read_is_refused(text, tmp_path):
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ScheduleError, match=r"schedule file .*bad\.csv: it cannot be read as CSV: "):
        read_schedule(path)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(text, tmp_path):
    (tmp_path / "empty.csv").write_text(text)
    with pytest.raises(ScheduleError, match=r"empty\.csv: it is empty\. Write a row for each rank"):
        read_schedule(tmp_path / "empty.csv")
