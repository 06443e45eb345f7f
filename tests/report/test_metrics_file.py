"""The metrics file: valid JSON a line, on disk at once, and no file before there is something to write."""

import builtins
import errno
import io
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


def test_a_full_disk_is_one_error_with_the_reason():
    message = r"--metrics-file\): /dev/full cannot be written: No space left on device\. Make room"
    with pytest.raises(ConfigError, match=message) as caught, metrics_file("/dev/full") as write:
        write({"step": 1})
    assert caught.value.__suppress_context__


def test_a_disk_that_fills_up_keeps_what_was_written(tmp_path, monkeypatch):
    class Filling(io.FileIO):
        def write(self, data):
            if self.tell() >= 30:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:7])

    monkeypatch.setattr(builtins, "open", lambda path, mode, buffering: Filling(path, "w"))
    with pytest.raises(ConfigError, match="No space left on device"), metrics_file(str(tmp_path / "m.jsonl")) as write:
        list(map(write, ({"step": 1}, {"step": 2, "loss": 0.5})))
    assert (tmp_path / "m.jsonl").read_text().startswith('{"step": 1}\n{"step": 2')


def test_a_file_that_fails_when_it_closes_is_told(tmp_path, monkeypatch):
    class Failing(io.FileIO):
        def close(self):
            if not self.closed:
                super().close()
                raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(builtins, "open", lambda path, mode, buffering: Failing(path, "w"))
    with pytest.raises(ConfigError, match="Input/output error"), metrics_file(str(tmp_path / "m.jsonl")) as write:
        write({"step": 1})


def test_a_folder_that_is_gone_since_it_was_checked_is_told(tmp_path):
    path = str(tmp_path / "gone" / "m.jsonl")
    with pytest.raises(ConfigError, match=r"m\.jsonl cannot be written: No such file or directory"), metrics_file(path):
        pass


@pytest.mark.parametrize(
    ("name", "message"), [("x" * 300, "cannot be written: File name too long"), ("a\0b", "null byte")]
)
def test_a_name_that_no_file_can_have_is_told(tmp_path, name, message):
    with pytest.raises(ConfigError, match=rf"--metrics-file\): .*{message}"):
        check_writable(str(tmp_path / name))


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
