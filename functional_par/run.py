"""``run`` starts ``main`` on every rank of a mesh: threads of this process, or the processes that torchrun started."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from functional_par.allocator import keep_freed_memory
from functional_par.comm.base import World
from functional_par.comm.threads import Switchboard, ThreadWorld
from functional_par.errors import CommError, MeshError
from functional_par.launch import launched, run_process
from functional_par.mesh import Mesh

Backend = Literal["threads", "gloo", "nccl"]
MOST_THREADS = 256
"""Ranks that one process runs; beyond, switching between threads takes the time that their work does not."""
GRACE = 5.0
"""Seconds that ranks get to notice that another has failed."""


def run(
    main: Callable[[World], Any],
    mesh: Mesh,
    backend: Backend | None = None,
    device: torch.device | str | None = None,
    timeout: float = 1800.0,
    keep_memory: bool = False,
) -> list[Any]:
    """Run ``main(world)`` on every rank of ``mesh``.

    Args:
        main: what each rank does.
        mesh: the layout of the ranks.
        backend: ``"threads"`` makes every rank a thread of this process; ``"gloo"`` and ``"nccl"`` make this process
            one rank among those that torchrun started. Left out: threads, unless torchrun started this process; then
            nccl where there is CUDA, else gloo.
        device: where tensors live; the CPU for threads and gloo, this process's GPU for nccl, if left out.
        timeout: seconds that a rank may wait for another.
        keep_memory: from here on this process keeps the CPU memory that tensors free for the next ones, instead of giving it
            back to the system and asking again, which takes about a twentieth of a step; see ``functional_par.allocator``.

    Returns:
        What ``main`` returned: of every rank in rank order for threads, and of this rank alone, in a list of one, for
        processes.

    Raises:
        MeshError: if the mesh does not have as many ranks as there are processes.
        CommError: for an unknown backend, one of processes without torchrun, or more than 256 threads.
        Exception: whatever ``main`` raised first on any rank; the other ranks are stopped.

    >>> run(lambda world: world.rank * 10, Mesh(dp=2))
    [0, 10]
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"run(main, {mesh!r}): the second argument is an fp.Mesh, such as fp.Mesh(dp=2, tp=2).")
    if not timeout > 0:
        raise CommError(f"run(timeout={timeout!r}): seconds that a rank may wait, a positive number.")
    if keep_memory:
        keep_freed_memory()
    if backend is None:
        backend = "threads" if not launched() else "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "threads":
        if mesh.size > MOST_THREADS:
            raise CommError(
                f"{mesh} has {mesh.size} ranks; at most {MOST_THREADS} run as threads of one process. Start "
                f"{mesh.size} processes (torchrun --nproc-per-node N), or make the mesh smaller."
            )
        return _run_threads(main, mesh, torch.device(device or "cpu"), timeout)
    if backend in ("gloo", "nccl"):
        return run_process(main, mesh, backend, None if device is None else torch.device(device), timeout)
    raise CommError(f"backend {backend!r}: it is one of threads, gloo, nccl.")


def _run_threads(main: Callable[[World], Any], mesh: Mesh, device: torch.device, timeout: float) -> list[Any]:
    board = Switchboard(mesh, timeout)
    results: list[Any] = [None] * mesh.size
    before = torch.get_num_threads()
    share = max(1, before // mesh.size)

    def rank_main(rank: int) -> None:
        torch.set_num_threads(share)
        # The engine's own threads would carry the backward of all ranks, and one that waits would block the others.
        torch.autograd.set_multithreading_enabled(False)
        try:
            results[rank] = main(ThreadWorld(board, rank, device))
        except BaseException as error:
            board.hub.fail(rank, error)
        else:
            board.hub.finish(rank)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(mesh.size)
    ]
    try:
        for thread in threads:
            thread.start()
        board.hub.wait_until_over()
    except BaseException as error:
        board.hub.fail(None, error)
        raise
    finally:
        _join(threads, GRACE)
        torch.set_num_threads(before)
    if (failure := board.hub.failure) is not None:
        doing = board.hub.records[failure.rank].doing if failure.rank is not None else ""
        raise _told(failure.error, f"raised on rank {failure.rank} of {mesh}" + (f", during {doing}" if doing else ""))
    return results


def _join(threads: list[threading.Thread], grace: float) -> None:
    deadline = time.monotonic() + grace
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _told(error: BaseException, note: str) -> BaseException:
    """The error itself, with a note for the reader of its traceback."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        print(f"functional_par: {note}", file=sys.stderr)
    return error
