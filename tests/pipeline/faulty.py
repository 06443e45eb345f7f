"""A pipeline in which something happens to one rank in the middle of a schedule: ``python -m tests.pipeline.faulty KIND``
runs it as processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import torch

import functional_par as fp
from functional_par import Mesh, Model, Param, init

STAGES, MICROBATCHES = 3, 4
AT = 2
"""The call of the layer in the middle, of those with data, in which it happens: the forward of microbatch 2."""
TIMEOUT = 8.0


class Fault(Exception):
    """What a layer of the user raises."""


def model(happens: Any) -> Model:
    """Three layers; the one in the middle calls ``happens`` at its third microbatch."""
    calls = [0]

    def layer(p: Any, x: Any, par: fp.Par) -> Any:
        return (x if isinstance(x, torch.Tensor) else x["x"]) @ p

    def middle(p: Any, x: Any, par: fp.Par) -> Any:
        if not x.is_meta:
            calls[0] += 1
            if calls[0] == AT + 1:
                happens()
        return x @ p

    def loss(p: Any, x: Any, par: fp.Par) -> Any:
        return x.square().sum(), torch.tensor(len(x))

    weight = Param((3, 3), "out in", init.normal(0.5))
    layers = [("first", "a", layer), ("middle", "b", middle), ("last", "c", layer)]
    batch = {"x": fp.Input((None, 3), torch.float64)}
    return Model({"a": weight, "b": weight, "c": weight}, layers, loss, batch)


def step_of(world: fp.World, happens: Any) -> Any:
    program = fp.compose(fp.stage_pp("1f1b", MICROBATCHES, [1, 1, 1]))(model(happens))
    step = program.step(world, fp.optim.sgd(lr=0.1), dtype=torch.float64)
    return step(step.init(0), {"x": torch.ones(MICROBATCHES, 3, dtype=torch.float64)})


def raises() -> None:
    raise Fault("a layer gave up")


HAPPENS = {
    "raises": raises,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "busy": lambda: threading.Event().wait(60.0),
}


def main(kind: str) -> None:
    torch.set_num_threads(1)
    fp.run(lambda world: step_of(world, HAPPENS[kind]), Mesh(pp=STAGES), backend="gloo", timeout=TIMEOUT)


if __name__ == "__main__":
    from ..spawn import spawn

    fp.compose(fp.stage_pp())(model(raises))  # what a first trace imports, the ranks need not import each
    sys.exit(spawn(STAGES, lambda: main(sys.argv[1])))
