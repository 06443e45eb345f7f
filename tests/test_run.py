"""How ``run`` starts and ends the ranks of one process; processes are in comm/test_process.py."""

import _thread
import threading
import time

import pytest
import torch

from functional_par.comm.base import AllReduce
from functional_par.errors import CommError, MeshError
from functional_par.mesh import Mesh
from functional_par.run import run
from tests.raises import matched


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_come_in_rank_order(size):
    def main(world):
        assert world.backend == "threads"
        assert world.device == torch.device("cpu")
        return world.rank, world.coords.dp

    assert run(main, Mesh(dp=size)) == [(rank, rank) for rank in range(size)]


def test_more_ranks_than_threads_are_refused():
    with pytest.raises(CommError, match=r"Mesh\(dp=257\) has 257 ranks; at most 256 run as threads .*torchrun"):
        run(lambda world: None, Mesh(dp=257))


def test_the_first_failing_rank_is_named_and_keeps_its_traceback(capsys):
    def main(world):
        if world.rank == 2:
            raise ZeroDivisionError("by zero")
        world.group("dp").start(AllReduce(), torch.ones(1)).wait()

    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        run(main, Mesh(dp=4))
    note = "raised on rank 2 of Mesh(dp=4)"
    assert note in getattr(
        caught.value, "__notes__", [capsys.readouterr().err.strip().removeprefix("functional_par: ")]
    )
    assert [entry.name for entry in caught.traceback][-1] == "main"


def test_leaving_a_rank_by_sys_exit_leaves_the_run():
    def main(world):
        raise SystemExit(2)

    with pytest.raises(SystemExit, match="2"):
        run(main, Mesh(dp=2))


def test_ctrl_c_stops_blocked_and_busy_ranks_quickly():
    stopped = []

    def main(world):
        try:
            if world.rank == 0:
                threading.Timer(0.2, _thread.interrupt_main).start()
            while True:
                if world.rank:
                    world.group("dp").start(AllReduce(), torch.ones(1)).wait()
                else:
                    time.sleep(0.05)
                    world.send(torch.ones(1), 1)
        except CommError as error:
            stopped.append(error)
            raise

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(main, Mesh(dp=2))
    assert time.monotonic() - started < 4
    assert len(stopped) == 2
    for rank, error in enumerate(sorted(stopped, key=str)):
        matched(error, f"rank {rank} stopped because the run was interrupted")


def test_threads_are_shared_out_and_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert run(lambda world: torch.get_num_threads(), Mesh(dp=2)) == [2, 2]
        assert run(lambda world: torch.get_num_threads(), Mesh(dp=8)) == [1] * 8
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


def test_runs_may_be_nested():
    assert run(lambda world: run(lambda inner: inner.rank, Mesh(tp=2)), Mesh(dp=2)) == [[0, 1], [0, 1]]


def test_an_unknown_backend_and_processes_without_a_launcher_are_refused():
    with pytest.raises(CommError, match="backend 'mpi': it is one of threads, gloo, nccl"):
        run(lambda world: None, Mesh(), backend="mpi")
    with pytest.raises(CommError, match=r"backend 'gloo' needs processes: .* torchrun --nproc-per-node 2"):
        run(lambda world: None, Mesh(dp=2), backend="gloo")


def test_a_mesh_of_another_size_than_the_launch_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(MeshError, match=r"dp=2 .* = 2 ranks, but 3 are running"):
        run(lambda world: None, Mesh(dp=2), backend="gloo")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match="2"):
        run(lambda world: None, Mesh(dp=2), backend="gloo")
