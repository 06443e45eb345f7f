"""How a script ends: message, traceback and exit code for every kind of end."""

import errno
import io
import subprocess
import sys

import numpy as np
import pytest
import torch

import functional_par as fp
from functional_par.report import exits
from functional_par.report.exits import exit_code
from tests.raises import matched


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def ends_with(error):
    def main():
        raise error

    return main


def test_a_good_run_is_zero():
    assert exit_code(lambda: None) == 0


@pytest.mark.parametrize(
    "error",
    [
        fp.ConfigError("wrong key"),
        fp.MeshError("wrong key"),
        fp.DataError("wrong key"),
        fp.CompositionError("wrong key"),
        fp.ModelError("wrong key"),
        fp.MissingCollective("wrong key"),
        fp.NonFiniteError("wrong key"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_user_can_mend_is_a_message_and_two(error, capsys):
    assert exit_code(ends_with(error)) == 2
    err = capsys.readouterr().err
    matched(err, "error: wrong key")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 1.02 TiB"),
        torch.OutOfMemoryError("Unable to allocate 1.02 TiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: Unable to allocate 1.02 TiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_a_message_and_two(error, capsys):
    assert exit_code(ends_with(error)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: out of memory: ")
    matched(err, "out of memory: ")
    matched(err, "Unable to allocate 1.02 TiB. Take a smaller model")
    assert err.count("\n") == 1


def test_memory_that_cannot_be_had_is_a_message_and_two(capsys):
    assert exit_code(lambda: torch.empty(2**50)) == 2
    assert capsys.readouterr().err.startswith("error: out of memory: ")
    assert exit_code(lambda: np.empty(2**50)) == 2


def test_a_memory_error_without_a_word_is_told_in_words(capsys):
    assert exit_code(ends_with(MemoryError())) == 2
    matched(capsys.readouterr().err, "out of memory: no more is left. Take a smaller model")


def test_a_full_disk_is_a_message_and_two(capsys, monkeypatch):
    monkeypatch.setattr(exits, "_drop_output", lambda: None)
    assert exit_code(ends_with(OSError(errno.ENOSPC, "No space left on device"))) == 2
    matched(capsys.readouterr().err, "error: No space left on device. Make room for the output.\n")


def test_output_that_has_no_room_is_one_message_also_when_python_ends():
    code = "import sys; from functional_par.report import exit_code; sys.exit(exit_code(lambda: print('x' * 100_000)))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device. Make room for the output.\n")


@pytest.mark.parametrize(
    "error", [RuntimeError("defect"), OSError(errno.EIO, "defect"), fp.DeadlockError("defect"), fp.StateError("defect")]
)
def test_a_defect_is_one_traceback_and_one(error, capsys):
    assert exit_code(ends_with(error)) == 1
    assert capsys.readouterr().err.count("Traceback") == 1


def test_a_rank_that_stopped_for_another_says_so_without_a_traceback(capsys):
    assert exit_code(ends_with(fp.RankFailedError("rank 1 stopped because rank 0 failed"))) == 1
    assert capsys.readouterr().err == "rank 1 stopped because rank 0 failed\n"


def test_an_interrupt_is_130_without_a_traceback(capsys):
    assert exit_code(ends_with(KeyboardInterrupt())) == 130
    err = capsys.readouterr().err
    matched(err, "interrupted")
    assert "Traceback" not in err


def test_an_exit_asked_for_passes():
    with pytest.raises(SystemExit):
        exit_code(ends_with(SystemExit(0)))


def test_other_processes_leave_the_first_to_speak(monkeypatch):
    waits, err = [], io.StringIO()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(exits.time, "sleep", waits.append)
    monkeypatch.setattr(sys, "stderr", err)
    assert exit_code(ends_with(fp.ConfigError("wrong key"))) == 2
    assert waits == [exits.PATIENCE]
    matched(err.getvalue(), "rank 3: error: wrong key\n")


def test_a_process_among_many_leaves_at_once_with_the_code(monkeypatch):
    codes = []
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(exits.os, "_exit", codes.append)
    exit_code(ends_with(fp.ConfigError("wrong key")))
    assert codes == [2]
