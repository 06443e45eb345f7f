"""Strict YAML: what is read, and what each refusal says."""

import math
import re

import pytest

from functional_par.config import Config, reader
from functional_par.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1E+3", 1000.0), ("2.5e-3", 2.5e-3), (".5e1", 5.0), ("-1e0", -1.0)]
)
def test_exponents_without_a_dot_are_numbers(text, value):
    assert reader.parse(f"a: {text}") == {"a": value}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("20", 20),
        ("-3", -3),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("01.5", 1.5),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("", None),
    ],
)
def test_words_mean_what_they_mean_in_yaml_1_2(text, value):
    found = reader.parse(f"a: {text}")["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1:20", "020", "-010", "1_000", "0b11", "1:20.5", "0o8", "1_0.5", "+.nan"])
def test_numbers_of_yaml_1_1_are_texts_so_no_key_takes_them(text):
    assert reader.parse(f"a: {text}") == {"a": text}
    with pytest.raises(ConfigError, match=rf"sequence_length: got '{re.escape(text)}' \(a text\); expected an integer"):
        Config.from_dict(
            reader.parse(f"model: {{d_model: 8, n_layers: 1, n_heads: 2}}\ntokens: {{sequence_length: {text}}}")
        )


@pytest.mark.parametrize("text", ["yes", "no", "On", "OFF", "y", "2024-01-31", "="])
def test_other_words_of_yaml_1_1_are_texts(text):
    assert reader.parse(f"a: {text}\n{text}: 1") == {"a": text, text: 1}


def test_not_a_number_is_read():
    assert math.isnan(reader.parse("a: .nan")["a"])


@pytest.mark.parametrize("text", ["'1e-4'", "1f1b", "e5", "1e", "a1e4"])
def test_what_is_no_number_stays_a_text(text):
    assert isinstance(reader.parse(f"a: {text}")["a"], str)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"x\.yaml, line 3: the key 'a' was already given on line 1"),
        ("s:\n  a: 1\n  a: 1", r"x\.yaml, line 3: the key 'a' was already given on line 2"),
        ("a: [1", r"x\.yaml: this is not plain YAML: .*line 1"),
        ("a: !!python/object/apply:os.system ['true']", r"x\.yaml: this is not plain YAML: .*python/object"),
        ("b: 1\na: !!int '020'", r"x\.yaml, line 2: '020' is no integer"),
        ("a: !!float '1:20'", r"x\.yaml, line 1: '1:20' is no number"),
        ("a: !!bool 'yes'", r"x\.yaml, line 1: 'yes' is neither true nor false"),
        ("a: !!timestamp noon", r"x\.yaml: this is not plain YAML"),
        ("a: 1\n---\nb: 2", r"this is not plain YAML: .*single document"),
        ("? [1, 2]\n: 3", r"this is not plain YAML: .*unhashable"),
        ("", r"x\.yaml: the file is empty; expected sections"),
        ("- 1", r"x\.yaml: the file holds a list; expected sections"),
        ("hello", r"x\.yaml: the file holds a str; expected sections"),
    ],
)
def test_a_bad_text_is_refused_with_its_place(text, message):
    with pytest.raises(ConfigError, match=message):
        reader.parse(text, "x.yaml")


def test_merge_keys_may_be_overridden():
    assert reader.parse("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: the configuration cannot be read: No such file"):
        reader.read(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="the configuration cannot be read: Is a directory"):
        reader.read(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"), [("", "'': the path of a config"), ("a\0b", "cannot be read: embedded null")]
)
def test_a_path_that_is_none_is_refused(path, message):
    with pytest.raises(ConfigError, match=message):
        reader.read(path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(ConfigError, match=r"x\.yaml: the configuration is not UTF-8 text: .* at byte 3"):
        reader.read(tmp_path / "x.yaml")
