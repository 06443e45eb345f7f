"""This process as one rank of those that torchrun started: set up, run, and end together with the others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from functional_par.comm.base import World
from functional_par.comm.process import ProcessWorld
from functional_par.comm.watch import INTERRUPTED, Watch, leave
from functional_par.errors import CommError, MeshError, NonFiniteError, ParallelError
from functional_par.mesh import Mesh

USER_ERROR = 2
"""Exit code of ranks that leave the report of an error to rank 0."""


def launched() -> bool:
    """Whether torchrun, or something like it, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_process(
    main: Callable[[World], Any], mesh: Mesh, backend: str, device: torch.device | None, timeout: float
) -> list[Any]:
    """Run ``main`` on this rank; see ``functional_par.run``."""
    if not launched():
        raise CommError(
            f"backend {backend!r} needs processes: start this with torchrun --nproc-per-node {mesh.size}, or use "
            f"backend 'threads', where ranks are threads of one process."
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _check_size(mesh, rank, size)
    device = _device(backend, device)
    store = _store(rank, timeout)
    worlds: list[ProcessWorld] = []

    def state() -> str:
        return _state(rank, worlds)

    watch = Watch(store.clone(), rank, size, state, lambda: worlds[0].standing() if worlds else None)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        worlds.append(ProcessWorld(mesh, device, timeout))
        result = main(worlds[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        watch.finish(worlds[0].finished())
        worlds[0].close()
    except BaseException as error:
        _end(watch, rank, error, state, communicated=bool(worlds) and worlds[0].record.worked)
        raise
    dist.destroy_process_group()
    return [result]


def _check_size(mesh: Mesh, rank: int, size: int) -> None:
    try:
        mesh.check_world(size)
    except MeshError:
        if rank == 0:
            raise
        _leave_it_to_rank_0()


def _device(backend: str, device: torch.device | None) -> torch.device:
    device = device or torch.device("cuda" if backend == "nccl" else "cpu")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def _store(rank: int, timeout: float) -> Any:
    """The launcher's store, under a name of this run's own: a process may run more than once."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=min(timeout, 300.0))))
    run = store.add(f"functional_par/runs/{rank}", 1)
    return dist.PrefixStore(f"functional_par/{run}", store)


def _state(rank: int, worlds: list[ProcessWorld]) -> str:
    if not worlds:
        return f"rank {rank} was starting"
    waits = worlds[0].waits
    doing = "was computing" if waits is None else f"was waiting in {waits}"
    return f"rank {rank} {doing}; last call: {worlds[0].record.last}"


def _end(watch: Watch, rank: int, error: BaseException, state: Callable[[], str], communicated: bool) -> None:
    """Make sure that the others end too, and that one rank reports: a rank that should not ends here."""
    # A number that is not finite is the same on every rank, like a mistake found before the first call.
    agreed = isinstance(error, NonFiniteError) or not communicated
    if isinstance(error, ParallelError) and agreed and watch.refused(error):
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank != 0:
            _leave_it_to_rank_0()
        return
    earlier = watch.fail(error)
    if isinstance(error, KeyboardInterrupt):
        if rank != 0:
            raise SystemExit(INTERRUPTED) from None
    elif earlier:
        leave(rank, earlier, state())
    elif not isinstance(error, SystemExit):
        print(f"functional_par: rank {rank} failed ({state()}); its error follows", file=sys.stderr, flush=True)


def _leave_it_to_rank_0() -> None:
    time.sleep(1.0)
    raise SystemExit(USER_ERROR) from None
