"""The metrics file: valid JSON a line, on disk at once, and no file before there is something to write."""

import json
import math

import pytest

from functional_par.errors import ConfigError
from functional_par.report.metrics_file import check_writable, encode, metrics_file


def test_every_record_is_on_disk_when_the_call_returns(tmp_path):
    path = tmp_path / "m.jsonl"
    with metrics_file(str(path)) as write:
        for step in (1, 2):
            write({"step": step, "loss": 0.1 * step})
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, step + 1))


def test_numbers_survive_to_the_last_bit(tmp_path):
    with metrics_file(str(tmp_path / "m.jsonl")) as write:
        write({"loss": 1 / 3})
    assert json.loads((tmp_path / "m.jsonl").read_text())["loss"] == 1 / 3


def test_a_new_run_starts_an_empty_file(tmp_path):
    (tmp_path / "m.jsonl").write_text("old\n")
    with metrics_file(str(tmp_path / "m.jsonl")):
        pass
    assert (tmp_path / "m.jsonl").read_text() == ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_lacks_is_null(value):
    assert json.loads(encode({"loss": value, "step": 1})) == {"loss": None, "step": 1}


def test_a_place_that_cannot_be_written_is_told_and_nothing_is_made(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"--metrics-file\): .* is a folder"):
        check_writable(str(tmp_path))
    with pytest.raises(ConfigError, match=r"the folder .*nowhere does not exist; make it first"):
        check_writable(str(tmp_path / "nowhere" / "m.jsonl"))
    check_writable(str(tmp_path / "m.jsonl"))
    check_writable(None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"m\.jsonl cannot be written; choose another place"):
        check_writable(str(tmp_path / "m.jsonl"))
    assert list(tmp_path.iterdir()) == []
