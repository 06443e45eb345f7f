"""Runs one rank's part of a schedule: receives, calls layers, sends, and hands every gradient over as soon as it exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.comm.base import Handle, World
from functional_par.pipeline.old_schedules import Action
from functional_par.pipeline.stage import Accumulator, Back, Call
from functional_par.run_par import RunPar
from functional_par.vjp import Engine


@dataclass(frozen=True)
class Neighbours:
    """World ranks of the stages before and after this one; None at the ends."""

    before: int | None
    after: int | None


class Executor:
    """Executes actions in order. Messages between two stages are FIFO in the order of the microbatches, which both ends
    read off the same schedule, so nothing but the tensors is sent.

    Args:
        calls: this stage's layers.
        world: for messages between stages.
        neighbours: the adjacent stages.
        engine: the differentiation engine.
        par: microbatch index to the ``par`` of that microbatch.
        leaves: this rank's parameters.
        scale: cotangent of the loss sum, used on the last stage.
        gradients: receives the gradients of one layer for one microbatch.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        world: World,
        neighbours: Neighbours,
        engine: Engine,
        par: Callable[[int], RunPar],
        leaves: Mapping[str, Tensor],
        scale: Tensor,
        gradients: Accumulator,
    ) -> None:
        self.calls, self.world, self.neighbours, self.engine = calls, world, neighbours, engine
        self.par, self.leaves, self.scale, self.gradients = par, leaves, scale, gradients
        self.pulls: dict[int, list[Back]] = {}
        self.sends: list[Handle] = []
        self.losses: list[tuple[Tensor, Tensor]] = []

    def run(self, actions: Sequence[Action]) -> list[tuple[Tensor, Tensor]]:
        """Run all actions; returns (loss sum, count) of each microbatch, in order, on the last stage."""
        steps: dict[str, Any] = {"F": self.forward, "B": self.backward}
        for action in actions:
            steps[action.kind](action.microbatch)
        for handle in self.sends:
            handle.wait()
        return self.losses

    def forward(self, microbatch: int) -> None:
        """Forward of one microbatch; keeps one pullback a layer."""
        with self.world.record.during("forward"):
            par = self.par(microbatch)
            x = self._input(par)
            pulls = self.pulls[microbatch] = []
            for call in self.calls:
                x, pull = call.forward(self.engine, self.leaves, x, par)
                pulls.append(pull)
            if self.neighbours.after is None:
                self.losses.append((x[0], x[1]))
            else:
                self.sends += [self.world.send(leaf, self.neighbours.after) for leaf in x]

    def backward(self, microbatch: int) -> None:
        """Backward of one microbatch: the pullbacks in reverse, each dropped as soon as it has run."""
        with self.world.record.during("backward"):
            cotangents = self._cotangents()
            pulls = self.pulls.pop(microbatch)
            for _ in self.calls:
                cotangents = pulls.pop()(cotangents, self.gradients, None)
            if self.neighbours.before is not None:
                self.sends += [self.world.send(ct, self.neighbours.before) for ct in cotangents]

    def _input(self, par: RunPar) -> list[Tensor]:
        if self.neighbours.before is None:
            return pytree.tree_leaves(dict(par.batch))
        handles = [self.world.recv(a.shape, a.dtype, self.neighbours.before) for a in self.calls[0].before.leaves]
        return [handle.wait() for handle in handles]

    def _cotangents(self) -> list[Tensor]:
        if self.neighbours.after is None:
            return [self.scale]
        edge = self.calls[-1].after
        expected = [leaf for leaf, grad in zip(edge.leaves, edge.differentiable, strict=True) if grad]
        handles = [self.world.recv(a.shape, a.dtype, self.neighbours.after) for a in expected]
        return [handle.wait() for handle in handles]
