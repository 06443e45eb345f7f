"""Trace files: what Perfetto reads, and read back as they were written; anything else is named with its place."""

import json

import pytest

from functional_par.errors import ConfigError
from functional_par.pipeline.timeline import Timeline
from functional_par.report.chrome_trace import Trace, encode, load, read_trace, write_trace

from .timelines import CHUNKS, TWO, timeline


def ordered(found, shift=0.0):
    return sorted((s.rank, round(s.start - shift, 9), round(s.end - shift, 9), s.action) for s in found.spans)


@pytest.mark.parametrize("written", [TWO, CHUNKS, timeline(3, "0:0F0:1e6:1000000.1 2:1F0:1000000.1:1000000.3", "s")])
def test_a_timeline_comes_back_as_it_was_written(tmp_path, written):
    path = str(tmp_path / "t.json")
    write_trace(path, written)
    found = read_trace(path)
    assert (found.ranks, found.unit) == (written.ranks, written.unit)
    assert ordered(found) == ordered(written, written.start)


def test_what_ran_comes_back_too(tmp_path):
    path = str(tmp_path / "t.json")
    labels = ("rank 0: pp 0, dp 0", "rank 1: pp 1, dp 0")
    write_trace(path, TWO, schedule="1f1b", pp=2, microbatches=2, labels=labels)
    found = load(path)
    assert (found.schedule, found.pp, found.microbatches, found.labels) == ("1f1b", 2, 2, labels)


def test_perfetto_sees_a_row_a_rank_and_microseconds():
    events = encode(Trace(timeline(2, "1:3I7:2:2.5", "s"), labels=("first",)))["traceEvents"]
    assert [e["args"] for e in events if e["name"] == "thread_name"] == [{"name": "first"}, {"name": "rank 1"}]
    assert [e["tid"] for e in events if e["name"] == "thread_sort_index"] == [0, 1]
    assert events[-1] == {
        "ph": "X",
        "name": "3I7",
        "cat": "input-backward",
        "pid": 0,
        "tid": 1,
        "ts": 0.0,
        "dur": 500000.0,
        "cname": "rail_animation",
        "args": {"stage": 3, "kind": "I", "microbatch": 7},
    }


def test_a_trace_that_says_nothing_of_itself_is_read(tmp_path):
    data = encode(Trace(TWO))
    del data["otherData"]
    (tmp_path / "t.json").write_text(json.dumps(data))
    found = load(str(tmp_path / "t.json"))
    assert (found.timeline.ranks, found.timeline.unit, found.schedule, found.pp) == (2, "s", "", 0)


SPAN = {"ph": "X", "tid": 0, "ts": 0, "dur": 1, "args": {"stage": 0, "kind": "F", "microbatch": 0}}


def holding(*events, **rest):
    return json.dumps({"traceEvents": list(events), **rest})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "it holds no JSON: "),
        ('{"traceEvents": [NaN]}', "it holds no JSON: NaN is no number of JSON"),
        ("[" * 100_000, "it holds no JSON: "),
        ("[]", "an object with a list traceEvents is expected, as --trace-file writes it"),
        (holding(SPAN, otherData=[]), "otherData: an object is expected"),
        (holding(SPAN, {"ph": "B"}), r"traceEvents\[1\]: a complete event \(ph X\) or one of metadata"),
        (holding({**SPAN, "args": {"kind": "G"}}), r"traceEvents\[0\]: its args have no kind F, B, I or W"),
        (holding({**SPAN, "tid": -1}), r"traceEvents\[0\]: tid is -1; an integer from 0 to 99999 is expected"),
        (holding({**SPAN, "tid": True}), "tid is True; an integer"),
        (holding({**SPAN, "args": {**SPAN["args"], "stage": 1.5}}), r"traceEvents\[0\]\.args: stage is 1\.5; an int"),
        (holding({**SPAN, "ts": "0"}), r"traceEvents\[0\]: ts is '0'; microseconds from 0 to 1e\+18 are expected"),
        (holding({**SPAN, "dur": -1}), "dur is -1; microseconds"),
        (holding({**SPAN, "ts": 7}).replace("7", "1e999"), "ts is inf; microseconds"),
        (holding({**SPAN, "ts": 10**400}), "ts is 10+; microseconds"),
        (holding(SPAN, otherData={"schedule": "\x1b[2J"}), "otherData: schedule is a text on one line, and unit is s"),
        (holding(SPAN, otherData={"unit": "ms"}), "otherData: schedule is a text on one line"),
        (holding({"ph": "M", "name": "thread_name", "tid": 0, "args": {"name": "a\n"}}), "the name of a row is exp"),
        (holding(SPAN, otherData={"ranks": 0}), "1 spans on 1 ranks do not fit the 0 ranks of otherData"),
        (holding(), "0 spans on 0 ranks do not fit"),
        (holding({**SPAN, "dur": 9}, {**SPAN, "dur": 9}), "0F0 ends; a rank does one at a time"),
        (holding({**SPAN, "dur": 9}, {**SPAN, "ts": 3}), "rank 0: 0F0 starts before 0F0 ends"),
    ],
)
def test_what_is_no_trace_is_named_with_its_place(tmp_path, text, message):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^trace file \S*t\.json.*{message}"):
        read_trace(str(path))


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^--trace .*none\.json: it cannot be read: No such file"):
        load(str(tmp_path / "none.json"), "--trace")


def test_nothing_but_numbers_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_trace(str(tmp_path / "t.json"), Timeline(1, timeline(1, "0:0F0:0:nan").spans))
    assert list(tmp_path.iterdir()) == []
