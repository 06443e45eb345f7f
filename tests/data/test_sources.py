"""Text and tokens come from files that exist, unchanged, or a clear error says why not."""

import pickle
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from functional_par.data import load_text, load_tokens, stdlib_text
from functional_par.errors import DataError


def test_the_standard_library_is_the_same_text_every_time_and_longer_cuts_begin_with_shorter_ones():
    short, long = stdlib_text(100_000), stdlib_text(300_000)
    assert (len(short), len(long), short.vocab) == (100_000, 300_000, 256)
    assert np.array_equal(short.tokens, long.tokens[:100_000])
    assert b"import" in bytes(short.tokens)
    assert 2.5 < short.unigram_entropy() < 4.0


def test_the_standard_library_has_some_megabytes_and_leaves_tests_and_packages_out():
    text = bytes(stdlib_text(100 << 20).tokens)
    assert len(text) > 4 << 20
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").read_bytes() in text
    assert all(
        path.read_bytes() not in text for path in (root / "site-packages").glob("*/__init__.py") if path.stat().st_size
    )


def test_a_python_without_sources_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r"comes without the sources of its standard library; name a text file"):
        stdlib_text()
    with pytest.raises(DataError, match=r"max_bytes=0\): an integer of at least 1"):
        stdlib_text(0)


def test_a_text_file_is_its_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes("grüße\n".encode())
    corpus = load_text(tmp_path / "a.txt")
    assert bytes(corpus.tokens) == "grüße\n".encode()
    assert corpus.vocab == 256


def test_a_folder_is_its_visible_files_in_the_order_of_their_paths(tmp_path):
    for name, text in {
        "b.txt": "B",
        "a/z.md": "Z",
        "a/tests/y": "Y",
        ".hidden": "H",
        ".git/x": "X",
        "a.txt": "A",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert bytes(load_text(str(tmp_path)).tokens) == b"YZAB"


def test_token_files_are_mapped_and_read_as_they_are(tmp_path):
    ids = np.array([1, 500, 3, 65_535])
    np.save(tmp_path / "ids.npy", ids.astype(np.int32))
    for dtype in ("uint16", "uint32"):
        ids.astype(dtype).tofile(tmp_path / f"{dtype}.bin")
        assert load_tokens(tmp_path / f"{dtype}.bin", 65_536, dtype).tokens.tolist() == ids.tolist()
    corpus = load_tokens(tmp_path / "ids.npy", 65_536)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tolist() == ids.tolist()


def write(folder, name, data):
    (folder / name).write_bytes(data)
    return folder / name


def saved(folder, name, array):
    np.save(folder / name, array, allow_pickle=True)
    return folder / name


def archive(folder, name):
    with open(folder / name, "wb") as file:
        np.savez(file, a=np.arange(3))
    return folder / name


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda d: load_text(d / "none" / "a.txt"),
            r"none/a\.txt does not exist; give the path of a file or folder \(the folder .* does\)\.$",
        ),
        (lambda d: load_text(""), r"^'' is no path; give the path of a file or folder"),
        (lambda d: load_tokens(" ", 8), r"^' ' is no path"),
        (lambda d: load_text(None), r"^None is no path"),
        (lambda d: load_text(d / ("x" * 300)), r"x cannot be read: File name too long"),
        (lambda d: load_text("~nobody-of-this-name/a"), r"a cannot be read: .*home directory"),
        (lambda d: load_tokens(d / "none.bin", 8, "uint16"), r"none\.bin does not exist"),
        (lambda d: load_text(write(d, "empty", b"")), r"empty is empty"),
        (lambda d: load_text(d), r" is empty"),
        (lambda d: load_text(write(d, "image.png", b"PNG\0")), r"image\.png is not text: byte 3 is zero"),
        (lambda d: load_tokens(d, 8, "uint16"), r"is a folder; name one file"),
        (
            lambda d: load_tokens(write(d, "a.bin", b"123"), 8, "uint16"),
            r"a\.bin has 3 bytes, .* uint16 \(2 bytes each\)",
        ),
        (
            lambda d: load_tokens(write(d, "a.bin", b"1234"), 8),
            r"a\.bin with dtype None: raw token ids need dtype='uint16'",
        ),
        (lambda d: load_tokens(write(d, "a.bin", b"1234"), 8, "float32"), r"dtype 'float32': raw token ids need"),
        (lambda d: load_tokens(write(d, "a.bin", b"1234"), 8, "nonsense"), r"dtype 'nonsense': raw token ids need"),
        (lambda d: load_tokens(write(d, "a.bin", b""), 8, "uint16"), r"a\.bin is empty"),
        (
            lambda d: load_tokens(write(d, "a.bin", b"\1\0\x51\xc3"), 256, "uint16"),
            r"a\.bin: token id 50001 at position 1",
        ),
        (lambda d: load_tokens(saved(d, "a.npy", np.zeros((2, 2), int)), 8), r"a\.npy: tokens of shape \(2, 2\)"),
        (lambda d: load_tokens(saved(d, "a.npy", np.array([{}])), 8), r"a\.npy is not a \.npy file of integers"),
        (lambda d: load_tokens(write(d, "a.npy", pickle.dumps([1])), 8), r"a\.npy is not a \.npy file of integers"),
        (lambda d: load_tokens(write(d, "a.npy", b""), 8), r"a\.npy is not a \.npy file of integers"),
        (lambda d: load_tokens(saved(d, "a.npy", np.zeros(3, "i4")), 8, "uint16"), r"a\.npy holds int32, not uint16"),
        (
            lambda d: load_tokens(saved(d, "a.npy", np.zeros(3, "i4")), 8, "nonsense"),
            r"a\.npy holds int32, not nonsense",
        ),
        (
            lambda d: load_tokens(archive(d, "a.npy"), 8),
            r"a\.npy is not a \.npy file of integers: .*Save one array of integers with numpy",
        ),
        (lambda d: load_tokens(write(d, "a.npy", b"PK\3\4" + bytes(40)), 8), r"a\.npy is not a \.npy file of integers"),
        (lambda d: load_tokens(saved(d, "a.npy", np.array(3)), 8), r"a\.npy: tokens of shape \(\)"),
        (lambda d: load_tokens(saved(d, "a.npy", np.zeros(0, int)), 8), r"a\.npy is (empty|not a \.npy file)"),
        (
            lambda d: load_tokens(saved(d, "a.npy", np.zeros(3, "i4,i4")), 8),
            r"a\.npy: tokens of shape \(3,\) and dtype",
        ),
    ],
)
def test_files_that_cannot_be_used_are_errors_that_name_them(tmp_path, load, message):
    with pytest.raises(DataError, match=message):
        load(tmp_path)


def test_a_missing_relative_path_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=rf"^none/a\.txt does not exist \(looked for {tmp_path}/none/a\.txt\); give the path"
    ):
        load_text("none/a.txt")


def test_a_length_that_is_none_is_refused():
    with pytest.raises(DataError, match=r"max_bytes='8'\): an integer of at least 1"):
        stdlib_text("8")


@pytest.mark.parametrize("load", [load_text, lambda path: load_tokens(path, 8, "uint16")])
def test_files_that_cannot_be_read_are_errors_that_say_why(tmp_path, monkeypatch, load):
    path = write(tmp_path, "locked.txt", b"text")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataError, match=r"locked\.txt cannot be read: Permission denied"):
        load(path)
