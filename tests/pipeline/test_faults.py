"""A rank that raises, is killed or stops answering in the middle of a schedule ends the others, who say what they were at."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

import functional_par as fp
from functional_par import CommError, DeadlockError, Mesh, RankFailedError

from .faulty import STAGES, Fault, raises, step_of

WAITS = {
    0: "rank 1 in recv over pp of float64[1, 3] (gradients of microbatch 1 from stage 1 to stage 0)",
    2: "rank 1 in recv over pp of float64[1, 3] (activations of microbatch 2 from stage 1 to stage 2)",
}
"""What the others wait for when stage 1 does not get through its forward of microbatch 2."""
AT = {0: "backward of microbatch 1 on stage 0", 2: "forward of microbatch 2 on stage 2"}


def run(happens, timeout):
    """What each rank raised, and what the run did. It happens once the others wait."""
    told = {}

    def main(world):
        hub = world._hub

        def happens_then():
            deadline = time.monotonic() + 10
            while not {0, 2} <= set(hub._waiting):
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
            happens()

        try:
            step_of(world, happens_then)
        except Exception as error:
            told[world.rank] = error
            raise

    with pytest.raises((Fault, CommError)) as caught:
        fp.run(main, Mesh(pp=STAGES), backend="threads", timeout=timeout)
    return told, caught.value


def test_a_layer_that_raises_ends_the_other_threads_and_each_says_what_it_was_waiting_for():
    start = time.monotonic()
    told, error = run(raises, 30.0)
    assert time.monotonic() - start < 10
    assert isinstance(error, Fault)
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["raised on rank 1 of Mesh(pp=3), during forward of microbatch 2 on stage 1"]
    for rank in (0, 2):
        assert isinstance(told[rank], RankFailedError)
        assert "rank 1 failed: Fault: a layer gave up" in str(told[rank])
        assert f"(it was waiting for {WAITS[rank]} and was at {AT[rank]})" in str(told[rank])


def test_a_thread_that_does_not_answer_is_told_after_the_timeout_with_a_line_for_every_rank():
    release = threading.Event()
    try:
        _, error = run(lambda: release.wait(60.0), 1.0)
    finally:
        release.set()
    assert isinstance(error, DeadlockError)
    lines = str(error).splitlines()
    assert "after 1 s without progress" in lines[0]
    assert "rank 1: is computing" in lines[2]
    assert "during forward of microbatch 2 on stage 1" in lines[2]
    for rank in (0, 2):
        assert f"waits for {WAITS[rank]}" in lines[rank + 1]
        assert f"during {AT[rank]}" in lines[rank + 1]


KINDS = ("raises", "killed", "stopped")


def heard(process):
    """What the processes say until the last stage has said what it was at. One that is stopped keeps the pipe open."""
    seen = ""
    while "microbatch 2 from stage 1 to stage 2" not in seen or "during forward of microbatch 2 on stage 2" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    return seen


def test_processes_end_within_the_timeout_and_say_what_they_were_waiting_for():
    start = time.monotonic()
    command = [sys.executable, "-m", "tests.pipeline.faulty"]
    started = [
        subprocess.Popen(
            [*command, kind], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for kind in KINDS
    ]
    try:
        said = dict(zip(KINDS, map(heard, started), strict=True))
    finally:
        for process in started:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
            process.communicate()
    assert time.monotonic() - start < 90
    assert "functional_par: rank 1 failed (rank 1 was computing" in said["raises"]
    assert "a layer gave up" in said["raises"]
