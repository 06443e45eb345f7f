"""Ranks as processes, over gloo: the same results as threads, and an end for all of them when one fails.

One pool of four processes serves most of these tests, since starting it takes ten seconds.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from functional_par.comm.standing import Standing, trouble
from functional_par.run import run
from tests.raises import matched

sys.path.insert(0, str(Path(__file__).parent))
import scenario

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")


def launch(*words):
    """Run Python on the scenario; what it printed, its exit code, and when it ended."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *words],
        env={**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.stdout + done.stderr, done.returncode, time.time()


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    output, code, ended = launch(*TORCHRUN, scenario.__file__, str(folder))
    found = [torch.load(folder / f"{rank}.pt") for rank in range(4)] if (folder / "3.pt").exists() else []
    return found, output, code, ended


@pytest.fixture(scope="module")
def threads():
    return run(scenario.main, scenario.MESH)


def test_processes_get_what_threads_get(pool, threads):
    found, output, *_ = pool
    assert found, output
    for ((results, *_), _), (expected, *_) in zip(found, threads, strict=True):
        assert results.keys() == expected.keys()
        for name, result in results.items():
            if name.startswith(("all sum", "all transposed", "all scalar", "three")):
                # gloo adds three values and more in an order of its own.
                torch.testing.assert_close(result, expected[name], rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(result, expected[name]), name


def test_all_processes_of_a_sum_get_the_same_bits(pool):
    found, output, *_ = pool
    assert found, output
    sums = [results["all sum"] for (results, *_), _ in found]
    assert all(torch.equal(total, sums[0]) for total in sums)


def test_processes_count_what_threads_count(pool, threads):
    found, output, *_ = pool
    assert found, output
    for ((_, calls, nbytes, _), _), (_, expected_calls, expected_nbytes, _) in zip(found, threads, strict=True):
        assert calls == expected_calls
        assert nbytes == expected_nbytes


def test_wrong_groups_and_short_messages_are_refused(pool):
    found, output, *_ = pool
    assert found, output
    for rank, ((*_, texts), _) in enumerate(found):
        matched(
            texts["odd"], f"group 'odd' of ranks {rank}, 9 was not prepared: call world.prepare on every rank first."
        )
    matched(
        found[3][0][3]["short"],
        "rank 2 sent fewer bytes to rank 3 than float32[4] has, which it expects. Shapes are static",
    )


def test_an_error_of_all_ranks_is_left_to_rank_0(pool):
    found, output, *_ = pool
    assert found, output
    (same, overflow, size), *others = [errors for _, errors in found]
    assert same == ("ModelError", "the model is wrong on every rank")
    assert overflow == ("NonFiniteError", "the loss is nan on every rank")
    assert size[0] == "MeshError"
    assert "= 3 ranks, but 4 are running" in size[1]
    assert others == [(("SystemExit", "2"),) * 3] * 3


def test_a_failing_process_ends_all_within_seconds_with_its_message(pool):
    _, output, code, ended = pool
    assert code != 0
    failed = float(re.search(r"failing at ([\d.]+)", output)[1])
    assert ended - failed < 15
    matched(output, "functional_par: rank 1 failed (rank 1 was computing; last call: ")
    assert "ValueError: boom on rank one" in output
    matched(output, "stops because rank 1 failed: ValueError: boom on rank one")
    assert re.search(r"\(rank [023] was waiting in all_reduce over pp\+tp of float32\[3\]", output)
    matched(output, "was waiting in all_reduce over pp+tp of float32[3]; last call: ")


def test_processes_that_wait_for_each_other_are_told_within_seconds():
    output, code, _ = launch(scenario.__file__)
    assert code != 0
    matched(output, "DeadlockError: ranks wait for each other and cannot go on.")
    assert "  rank 0: waits for rank 1 in recv over pp of float32[3]; last call: recv over pp of float32[3]" in output
    assert "  rank 1: waits for rank 0 in all_reduce over dp of float32[2]" in output
    assert re.search(r"rank [01] stops because rank [01] found this: DeadlockError", output)


DIFFERENT = (
    "MismatchError: ranks of one group entered different collectives at the same place.\n  rank 0: waits for rank 1"
)
STUCK = "DeadlockError: ranks wait for each other and cannot go on.\n  rank 0: waits for rank 1"


def waiting(what, place, *started):
    return Standing("last", what, what, "0,1", place, (0, 1), {"0,1": started[0]})


@pytest.mark.parametrize(
    ("standings", "found"),
    [
        ({}, None),
        ({0: waiting("sum", 0, 1)}, None),
        ({0: waiting("sum", 0, 1), 1: waiting("sum", 0, 1)}, None),
        ({0: waiting("sum", 0, 1), 1: waiting("max", 0, 1)}, DIFFERENT),
        ({0: waiting("sum", 0, 1), 1: Standing("end", started={"0,1": 1})}, None),
        ({0: waiting("sum", 1, 2), 1: Standing("end", started={"0,1": 1})}, STUCK),
        ({0: waiting("sum", 1, 2), 1: Standing("x", "recv", "recv", "0>1", 0, (0,), {"0,1": 1})}, STUCK),
        ({0: Standing("end"), 1: Standing("end")}, None),
    ],
)
def test_trouble_is_what_no_rank_can_get_out_of(standings, found):
    why = trouble(standings, 2)
    if found is None:
        assert why is None
    else:
        matched(why, found)


def test_ranks_without_a_standing_are_computing():
    standings = {0: waiting("sum", 1, 2), 1: Standing("end", started={"0,1": 1})}
    assert trouble(standings, 3).splitlines()[-1] == "  rank 2: is computing"
    assert Standing.loads(standings[0].dumps()) == standings[0]
