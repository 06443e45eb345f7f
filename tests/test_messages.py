"""The list of error messages, and what counts as a test of one."""

import textwrap

import pytest

from functional_par import errors
from functional_par.mesh import Mesh

from .messages import Package
from .raises import Note, Notes, matched, missed

SAMPLE = """
import sys
from typing import NoReturn

FIXES = {"tp": "Leave tp alone.", "dp": "Leave dp alone."}

def hint(n: int) -> str:
    if n:
        return " Try a smaller number."
    return ""

def wrong(name: str) -> ValueError:
    return ValueError(f"{name} is wrong.{hint(1)}")

def refuse(message: str) -> NoReturn:
    raise TypeError(f"layer: {message}")

def say(text: str) -> None:
    print(text, file=sys.stderr)

def check(x, axis):
    if x:
        raise ValueError(f"x is {'positive' if x > 0 else 'below zero'} here. {FIXES[axis]}")
    if x is None:
        refuse("x is missing")
    say("nothing left to do")
    try:
        raise SystemExit(2)
    except SystemExit:
        raise
    raise wrong("x")
"""


@pytest.fixture
def sites(tmp_path):
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / "a.py").write_text(textwrap.dedent(SAMPLE))
    return Package(tmp_path / "sample").sites()


def test_every_place_that_makes_an_error_is_found_with_its_words(sites):
    assert [site.parts for site in sites if site.kind == "place"] == [
        (" is wrong.",),
        ("layer: ",),
        ("x is ", " here. "),
        ("x is missing",),
        ("x",),
    ]


def test_what_is_said_in_some_cases_only_is_found_wherever_it_stands(sites):
    texts = [" ".join(site.parts) for site in sites if site.kind == "text"]
    assert texts == [
        "Leave dp alone.",
        "Leave tp alone.",
        " Try a smaller number.",
        "below zero",
        "positive",
        "nothing left to do",
    ]


def note(site, pattern, message, *more):
    return Note(pattern, message, tuple(((s.file, s.first),) for s in (site, *more)))


def left(sites, *notes):
    return {line.split(": ")[-2] for line in missed(sites, notes)}


def test_a_message_counts_when_a_pattern_matches_it_and_fits_no_other(sites):
    wrong, check = (site for site in sites if site.parts in ((" is wrong.",), ("x is ", " here. ")))
    first = note(wrong, "x is wrong", "x is wrong. Try a smaller number.")
    second = note(check, "x is", "x is positive here. Leave tp alone.")
    before, after = missed([wrong, check], [first]), missed([wrong, check], [first, second])
    assert [line.endswith("no test") for line in before] == [True]
    assert [line.endswith("no words of its own in 'x is'") for line in after] == [True]
    third = note(check, "x is positive here", "x is positive here. Leave tp alone.")
    assert missed([wrong, check], [first, second, third]) == ()


def test_a_text_counts_when_the_pattern_lies_on_it(sites):
    texts = [site for site in sites if " ".join(site.parts) in ("positive", "below zero", "Leave tp alone.")]
    check = next(site for site in sites if site.parts == ("x is ", " here. "))
    message = "x is positive here. Leave tp alone."
    assert len(missed(texts, [note(check, "here", message)])) == 3
    assert len(missed(texts, [note(check, "positive here", message)])) == 2
    assert len(missed(texts, [note(check, "positive here. Leave tp", message)])) == 1


def test_a_text_that_was_read_is_found_by_its_words(sites):
    printed = [site for site in sites if site.parts == ("nothing left to do",)]
    assert missed(printed, [Note("left to do", "rank 3: nothing left to do", ())]) == ()
    assert missed(printed, [Note("left to do", "rank 3: nothing is left to do", ())]) != ()


def test_an_error_is_noted_with_the_lines_that_made_it_and_those_it_was_made_from():
    notes = Notes()
    with pytest.raises(errors.MeshError, match="unknown axis") as caught:
        Mesh().groups("model")
    notes.add(caught.value, "unknown axis")
    try:
        try:
            raise caught.value
        except errors.MeshError as error:
            raise errors.ConfigError(f"x.yaml, {error}") from None
    except errors.ConfigError as error:
        notes.add(error, "axes of a mesh")
        notes.add(error, "x.yaml")
    first, second, third = notes.made.values()
    assert first.made[0][0][0] == "functional_par/mesh.py"
    assert second.made == ((), first.made[0])
    assert third.made == ((),)


def test_matched_fails_for_other_words():
    matched("rank 3: nothing left (2)", "left (2)")
    with pytest.raises(AssertionError, match="Regex pattern did not match"):
        matched("rank 3: nothing left (2)", "left 2")
    with pytest.raises(AssertionError, match="Regex pattern did not match"):
        matched(ValueError("x"), "y")
