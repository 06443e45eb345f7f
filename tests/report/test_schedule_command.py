"""``python -m functional_par schedule``: its numbers against those worked out by hand, its pictures, files and complaints."""

import json
import re
import subprocess
import sys

import pytest

from functional_par import ParallelError
from functional_par.__main__ import main
from functional_par.pipeline.schedule import Action
from functional_par.pipeline.schedule_file import read_schedule
from functional_par.pipeline.schedules import make_schedule
from functional_par.report import exit_code
from functional_par.report.chrome_trace import load, write_trace

from .timelines import TWO, timeline

PIPELINE = "parallelism: {pp: 2, dp: 2, pp_engine: GPipe}\n"
CONFIG = PIPELINE + "tokens: {sequence_length: 8, train_steps: 2, micro_batch_size: 1, microbatches: 3}\n"
CONFIG += "model: {d_model: 16, n_layers: 2, n_heads: 4}\n"


@pytest.fixture
def printed(capsys):
    def run(*argv):
        main(["schedule", *map(str, argv)])
        return capsys.readouterr().out

    return run


@pytest.fixture
def numbers(printed):
    return lambda *argv: json.loads(printed(*argv, "--json"))


def test_the_object_of_a_small_schedule_exactly(numbers):
    assert numbers("--schedule", "1f1b", "--stages", 2, "--microbatches", 2) == {
        "schedule": "1f1b",
        "bubble": pytest.approx(1 / 3),
        "makespan": 9.0,
        "live_activations": [2, 1],
        "actions": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
    }


@pytest.mark.parametrize(
    ("name", "options", "makespan", "live"),
    [
        ("1f1b", (), 33, [4, 3, 2, 1]),  # (m + p - 1) (F + B)
        ("GPipe", (), 33, [8, 8, 8, 8]),
        ("Interleaved1F1B", ("--chunks", 2), 57, None),  # (v m + p - 1) (F + B)
        ("interleaved", ("--chunks", 3), 81, None),
        ("ZB-H1", (), 27, None),  # m (F + I + W) + (p - 1) (F + I - W)
        ("zbv", (), None, None),
        ("1f1b", ("--input-backward-cost", 0.5, "--weight-backward-cost", "0.25"), 11 * 1.75, [4, 3, 2, 1]),
        ("1f1b", ("--transfer-cost", 0.5), None, [4, 3, 2, 1]),
        ("afab", ("--forward-cost", "1,1,1,2"), 8 * 2 + 3 + 8 * 2 + 3 * 2, [8, 8, 8, 8]),
    ],
)
def test_numbers_are_those_worked_out_by_hand(numbers, name, options, makespan, live):
    found = numbers("--schedule", name, "--stages", 4, "--microbatches", 8, *options)
    work = sum({"F": 1, "B": 2}.get(Action.parse(action).kind, 1) for action in found["actions"][0])
    if makespan is not None:
        assert found["makespan"] == pytest.approx(makespan)
    if not options or options[0] == "--chunks":
        assert found["bubble"] == pytest.approx(1 - work / found["makespan"])
    assert live is None or found["live_activations"] == live
    assert len(found["live_activations"]) == len(found["actions"]) == 4


def test_1f1b_is_the_default(numbers):
    assert numbers("--stages", 2, "--microbatches", 3)["schedule"] == "1f1b"


def test_the_picture_and_the_table_of_a_small_schedule_exactly(printed):
    assert printed("--stages", 2, "--microbatches", 2).splitlines() == [
        "1f1b: 2 ranks, 2 stages, 2 microbatches",
        "",
        "rank 0  F0F1....B0--..B1--",
        "rank 1  ..F0B0--F1B1--....",
        "",
        "F forward, B backward; after it the microbatch",
        "",
        "bubble    33.3% of a makespan of 9, mean over the ranks",
        "1f1b      33.3% = (p - 1) / (m + p - 1), as afab, if all stages cost the same",
        "",
        "rank  stages  busy  live activations",
        "----  ------  ----  ----------------",
        "0     0       6     2",
        "1     1       6     1",
    ]


def test_a_terminal_gets_colours_within_its_width(printed, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = printed("--stages", 4, "--microbatches", 8)
    assert "\x1b[" in shown
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert "\n\ntime 0 to 16\nrank 0  F0F1F2F3" in plain
    assert re.findall(r"^rank 3 .*(B\d)", plain, re.MULTILINE)[-1] == "B7"
    assert all(len(line) <= 40 for line in plain.splitlines() if line.startswith(("rank 0 ", "time")))


def test_a_schedule_comes_from_a_configuration_and_flags_go_first(numbers, tmp_path):
    (tmp_path / "x.yaml").write_text(CONFIG)
    found = numbers("--config-file", tmp_path / "x.yaml")
    assert (found["schedule"], found["live_activations"]) == ("afab", [3, 3])
    found = numbers("--config-file", tmp_path / "x.yaml", "--schedule", "1f1b", "--stages", 3)
    assert (found["schedule"], found["live_activations"]) == ("1f1b", [3, 2, 1])


def test_what_is_written_as_csv_is_read_again(printed, numbers, tmp_path):
    path = tmp_path / "mine.csv"
    printed("--schedule", "zbv", "--stages", 2, "--microbatches", 4, "--csv-output", path)
    assert read_schedule(str(path)).rows == make_schedule("zbv", 2, 4).rows
    again = numbers("--schedule", path)
    assert again["actions"] == [list(map(str, row)) for row in make_schedule("zbv", 2, 4).rows]
    assert numbers("--schedule", path, "--stages", 2, "--microbatches", 4) == again


def test_a_rank_without_stages_has_a_line_in_the_csv(printed, tmp_path):
    (tmp_path / "idle.csv").write_text('0F0,0B0\n""\n')
    printed("--schedule", tmp_path / "idle.csv", "--csv-output", tmp_path / "again.csv")
    assert read_schedule(str(tmp_path / "again.csv")).rows == read_schedule(str(tmp_path / "idle.csv")).rows


def test_a_picture_is_drawn_to_a_file(printed, tmp_path):
    printed("--stages", 2, "--microbatches", 2, "--output", tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    assert "<svg" in text
    assert "1f1b: 2 ranks, 2 stages, 2 microbatches, bubble 33.3%" in text


def test_a_run_is_drawn_from_its_trace_beside_its_simulation(printed, numbers, tmp_path):
    slow = timeline(2, "0:0F0:0:1 0:0F1:1:2 0:0B0:5:7 0:0B1:8:10 1:1F0:1:2 1:1B0:2:5 1:1F1:5:6 1:1B1:6:8", "s")
    path = str(tmp_path / "t.json")
    write_trace(path, slow, schedule="1f1b", pp=2, microbatches=2, labels=("rank 0: pp 0",))
    found = numbers("--trace", path)
    assert found == {
        "schedule": "1f1b",
        "bubble": pytest.approx(1 - 13 / 20),
        "makespan": pytest.approx(10),
        "live_activations": [2, 1],
        "actions": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "simulated": {"bubble": pytest.approx(1 - 13 / 20), "makespan": pytest.approx(10)},
    }
    shown = printed("--trace", path)
    assert "1f1b, measured: 2 ranks, 2 stages, 2 microbatches" in shown
    assert "rank 0: pp 0  F0F1......B0--..B1--" in shown
    assert "simulated 35.0% of 10 s, with the mean times of each stage" in shown
    printed("--trace", path, "--output", tmp_path / "both.svg")
    drawn = (tmp_path / "both.svg").read_text()
    assert "1f1b, measured: 2 ranks, 2 stages, 2 microbatches, bubble 35.0%" in drawn
    assert "simulated, with the mean times of each stage, bubble 35.0%" in drawn
    assert [drawn.count(f">{name}<") for name in ("rank 0: pp 0", "rank 1", "pp 0", "pp 1", "backward")] == [1] * 5


def test_a_trace_of_no_whole_schedule_is_drawn_all_the_same(printed, numbers, tmp_path):
    path = str(tmp_path / "t.json")
    write_trace(path, timeline(2, "0:0F0:0:1 1:0F0:1:2 1:0F1:3:4", "s"))
    assert numbers("--trace", path)["live_activations"] is None
    assert "unknown" in printed("--trace", path)


def test_the_trace_of_an_evaluation_is_a_schedule_of_forwards(numbers, tmp_path):
    path = str(tmp_path / "t.json")
    write_trace(path, timeline(2, "0:0F0:0:1 0:0F1:1:2 1:1F0:1:2 1:1F1:2:3", "s"))
    assert numbers("--trace", path)["simulated"] == {"bubble": pytest.approx(1 / 3), "makespan": pytest.approx(3)}


def test_a_simulation_is_written_for_perfetto(printed, tmp_path):
    printed("--stages", 2, "--microbatches", 2, "--output", tmp_path / "t.json")
    found = load(str(tmp_path / "t.json"))
    assert (found.schedule, found.pp, found.microbatches) == ("1f1b", 2, 2)
    assert set(found.timeline.spans) == set(TWO.spans)


SMALL = ("--stages", 2, "--microbatches", 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--schedule", "wave", *SMALL), "wave"),
        (("--stages", 2), "--microbatches is missing: a number, or a --config-file that has it"),
        (("--microbatches", 2), "--stages is missing: a number"),
        (("--stages", 0, "--microbatches", 2), "--stages 0: an integer of at least 1 is expected"),
        (("--stages", 2, "--microbatches", -1), "--microbatches -1: an integer of at least 1"),
        (("--stages", "two"), "argument --stages: invalid integer value: 'two'"),
        (("--stages", 1000, "--microbatches", 1000), "make 1000000 forwards; a schedule of at most 200000 is shown"),
        ((*SMALL, "--chunks", 0), "--chunks 0: an integer of at least 1"),
        ((*SMALL, "--chunks", 2), "1f1b"),
        (
            (*SMALL, "--forward-cost", "-1"),
            "-1: a number of at least 0 is expected, or one for each stage, as in 1,1,2.",
        ),
        ((*SMALL, "--forward-cost", ".nan"), "--forward-cost .nan: a number"),
        ((*SMALL, "--transfer-cost", "slow"), "--transfer-cost slow: a number"),
        ((*SMALL, "--transfer-cost", "1,2"), "--transfer-cost 1,2: one number is expected"),
        ((*SMALL, "--weight-backward-cost", ""), "--weight-backward-cost : a number"),
        ((*SMALL, "--input-backward-cost", "1,2,3"), "1,2,3: 3 numbers for 2 stages. Give one, or one a stage"),
        (
            (*SMALL, "--output", "x.gif"),
            "--output x.gif: the name of a picture ends in .svg, .png or .pdf, or in .json",
        ),
        ((*SMALL, "--output", "nowhere/x.svg"), "--output: nowhere/x.svg could not be written"),
        ((*SMALL, "--csv-output", "nowhere/x.csv"), "--csv-output: nowhere/x.csv could not be written"),
        (("--trace", "nowhere.json"), "--trace nowhere.json: it cannot be read: No such file or directory"),
        (("--trace", "t.json", *SMALL), "--trace t.json has the schedule of its run: leave out --stages"),
        (("--trace", "t.json", "--forward-cost", "1"), "leave out --forward-cost, which is for a simulated one"),
        (("--schedule", "nowhere.csv"), "nowhere.csv"),
        (("--schedule", "mine.csv", "--chunks", 1), "--chunks 1: mine.csv says itself which stages a rank has"),
        (("--schedule", "mine.csv", "--stages", 3), "--stages 3: mine.csv has 2. Leave it out, or make them equal"),
        (("--schedule", "mine.csv", *SMALL, "--microbatches", 5), "--microbatches 5: mine.csv has 2"),
        (("--config-file", "nowhere.yaml"), "nowhere.yaml: the configuration cannot be read"),
        (("--stage", 2), "unrecognized arguments: --stage 2"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_printed(argv, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    with pytest.raises(ParallelError, match=re.escape(message)) as caught:
        main(["schedule", *map(str, argv)])
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_the_command_prints_one_object_in_a_process_of_its_own():
    argv = [sys.executable, "-m", "functional_par", "schedule", "--stages", "2", "--microbatches", "1", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["makespan"] == 6.0


def test_a_complaint_is_one_line_and_exit_code_two(capsys):
    assert exit_code(lambda: main(["schedule", "--schedule", "wave", "--json", *map(str, SMALL)])) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith("error: schedule 'wave' is unknown. There are afab, 1f1b, ")
