"""The progress: what rank 0 shows, and the history that every rank keeps."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from functional_par.config import Config
from functional_par.report.progress import progress

METRICS = {"loss": 2.0, "grad_norm": 1.0, "tokens": 100, "lr": 1e-3}


def config(tmp_path, steps=6, interval=2):
    return Config.from_dict(
        {
            "tokens": {"sequence_length": 4, "train_steps": steps, "global_batch_size": 2},
            "model": {"d_model": 8, "n_layers": 1, "n_heads": 2},
            "logging": {"iteration_step_info_interval": interval, "metrics_file": str(tmp_path / "m.jsonl")},
        }
    )


def run(tmp_path, rank=0, **options):
    with progress(SimpleNamespace(rank=rank), config(tmp_path, **options)) as log:
        for _ in range(6):
            log(METRICS)
    return log.history


def test_plain_lines_come_at_the_interval_and_at_both_ends(tmp_path, capsys):
    run(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/6", "2/6", "4/6", "6/6"]
    assert all("loss 2.0000  grad norm 1.000  lr 1.0e-03" in line and line.endswith("left") for line in lines)


def test_other_ranks_show_and_write_nothing_but_keep_the_history(tmp_path, capsys):
    history = run(tmp_path, rank=1)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "m.jsonl").exists()
    assert [record["step"] for record in history] == [1, 2, 3, 4, 5, 6]


def test_the_metrics_file_holds_the_history(tmp_path):
    history = run(tmp_path)
    written = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert written == history
    assert set(written[0]) == {"step", "loss", "grad_norm", "tokens", "tokens_per_s", "lr", "seconds"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_moves(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    run(tmp_path)
    assert "step 6/6  loss 2.0000" in terminal.getvalue()
    assert "left" in terminal.getvalue()


def break_after_one_step(tmp_path):
    with progress(SimpleNamespace(rank=0), config(tmp_path)) as log:
        log(METRICS)
        raise RuntimeError("broken")


def test_an_error_in_training_passes_and_leaves_what_was_written(tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        break_after_one_step(tmp_path)
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 1
