"""Files are written whole or not at all."""

import os

import pytest

from functional_par.errors import ConfigError
from functional_par.report import files


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    files.write(str(path), b"new", "--output")
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"new", ["a.txt"])


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    files.write(str(tmp_path / "link"), b"new", "--output")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_text() == "new"


def test_what_cannot_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ConfigError, match=r"--output: .*a\.txt could not be written: No space left on device\. Choose"):
        files.write(str(tmp_path / "a.txt"), b"new", "--output")
    assert (os.listdir(tmp_path), (tmp_path / "a.txt").read_text()) == (["a.txt"], "old")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/a", "nowhere/a could not be written: No such file or directory"),
        ("", "is a folder; give the name of a file in it"),
        ("a\0b", "--output: .*could not be written: .*null"),
        ("pipe", "is a device or a pipe, which a file must not replace"),
    ],
)
def test_a_place_that_cannot_be_is_named(tmp_path, name, message):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=message):
        files.write(f"{tmp_path}/{name}", b"", "--output")
