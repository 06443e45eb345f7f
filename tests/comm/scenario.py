"""What ranks do in test_process.py. Run by torchrun it writes into a folder what each process got; imported, threads do the
same. Run by itself it starts two processes that wait for each other."""

import os
import sys
import time
from pathlib import Path

import torch

from functional_par.comm import collectives
from functional_par.comm.base import AllGather, AllReduce, AllToAll, Permute, ReduceScatter
from functional_par.errors import CommError, MeshError, MismatchError, ModelError, NonFiniteError
from functional_par.mesh import Mesh
from functional_par.run import run
from tests.spawn import spawn

MESH = Mesh(pp=2, tp=2)
OPS = {
    "sum": AllReduce(),
    "max": AllReduce("max"),
    "gather 0": AllGather(0),
    "gather 1": AllGather(1),
    "scatter 0": ReduceScatter(0),
    "scatter 1": ReduceScatter(1),
    "exchange 0 0": AllToAll(0, 0),
    "exchange 0 1": AllToAll(0, 1),
    "exchange 1 0": AllToAll(1, 0),
    "exchange 1 1": AllToAll(1, 1),
}


def value(world, *shape, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + world.rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def every_op(world):
    """Every op over two and over four ranks, with the inputs left as they were, and waited for in another order."""
    world.prepare([(0, 3), (1, 2), (0, 1, 2)])
    groups = {
        "tp": world.group("tp"),
        "pp": world.group("pp"),
        "pair": world.subgroup((0, 3) if world.rank in (0, 3) else (1, 2), "tie embed"),
        "all": world.group("pp", "tp"),
    }
    x, kept = value(world, 4, 8), value(world, 4, 8)
    started = {(name, op): group.start(OPS[op], x) for op in OPS for name, group in groups.items()}
    for name, group in groups.items():
        to = tuple((i + 1) % group.size for i in range(group.size))
        started[name, "turn"] = group.start(Permute(to), x)
        started[name, "stay"] = group.start(Permute(tuple(range(group.size))), x)
        started[name, "transposed"] = group.start(AllReduce(), value(world, 3, 5).T)
        started[name, "scalar"] = group.start(AllReduce(), x.sum())
    if world.rank < 3:
        started["three", "sum"] = world.subgroup((0, 1, 2), "three").start(AllReduce(), x)
    order = sorted(started) if world.rank % 2 else sorted(started, reverse=True)
    results = {" ".join(key): started[key].wait() for key in order}
    assert torch.equal(x, kept)
    return results


def donated(world):
    x = value(world, 300)
    result = world.group("tp").start(AllReduce(), x, donate=True).wait()
    assert world.backend == "threads" or result.data_ptr() == x.data_ptr()
    return {"donated": result}


def messages(world):
    """Three messages each way between the stages, received in another order."""
    other = (world.rank + 2) % 4
    for seed in range(3):
        world.send(value(world, 5, seed=seed).to(torch.float32), other)
    handles = [world.recv((5,), torch.float32, other) for _ in range(3)]
    return {f"message {i}": handles[i].wait() for i in (2, 0, 1)}


def differentiated(world):
    """A pullback through collectives on both axes."""
    tp = world.group("tp")

    def f(x):
        return collectives.psum(collectives.all_gather(x, tp, 0).sin(), world.group("pp"))

    y, pull = torch.func.vjp(f, value(world, 2, 3))
    return {"y": y, "pulled": pull(y.cos())[0]}


def refusals(world):
    """Errors that end nothing: a group that nobody prepared, and a message that is too short."""
    texts = {}
    try:
        world.subgroup((world.rank, 9), "odd")
    except CommError as error:
        texts["odd"] = str(error)
    if world.rank == 2:
        world.send(torch.ones(2), 3)
    if world.rank == 3 and world.backend == "gloo":
        try:
            world.recv((4,), torch.float32, 2).wait()
        except MismatchError as error:
            texts["short"] = str(error)
    return texts


def main(world):
    results = {**every_op(world), **donated(world), **messages(world), **differentiated(world)}
    return results, dict(world.record.calls), dict(world.record.nbytes), refusals(world)


def refused(world):
    raise ModelError("the model is wrong on every rank")


def overflows(world):
    world.group("tp").start(AllReduce(), torch.ones(1)).wait()
    raise NonFiniteError("the loss is nan on every rank")


def fails(world):
    world.group("tp").start(AllReduce(), torch.ones(3)).wait()
    if world.rank == 1:
        print(f"failing at {time.time()}", flush=True)
        raise ValueError("boom on rank one")
    world.group("pp", "tp").start(AllReduce(), torch.ones(3)).wait()


def stuck(world):
    if world.rank == 0:
        world.recv((3,), torch.float32, 1).wait()
    if world.rank == 1:
        world.group("dp").start(AllReduce(), torch.ones(2)).wait()


def attempt(function, mesh):
    """The kind and the text of the error that ``run`` raises."""
    try:
        run(function, mesh)
    except (ModelError, MeshError, NonFiniteError, SystemExit) as error:
        return type(error).__name__, str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        sys.exit(spawn(2, lambda: run(stuck, Mesh(dp=2))))
    folder = Path(sys.argv[1])
    [found] = run(main, MESH)
    errors = attempt(refused, MESH), attempt(overflows, MESH), attempt(main, Mesh(dp=3))
    torch.save((found, errors), folder / f"{os.environ['RANK']}.pt")
    run(fails, MESH)
