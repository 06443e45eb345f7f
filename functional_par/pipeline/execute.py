"""Runs one rank's part of a schedule: receives, calls layers, sends, and hands every gradient over as soon as it exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.capture import Accumulator, Complete, Pair
from functional_par.comm.base import Handle, World
from functional_par.errors import ScheduleError
from functional_par.pipeline.back import Backward
from functional_par.pipeline.buffers import Buffers
from functional_par.pipeline.messages import Message, Task
from functional_par.pipeline.part import Carried, Chunk, Part
from functional_par.pipeline.recording import Recording
from functional_par.pipeline.routes import BATCH
from functional_par.pipeline.schedule import Action
from functional_par.run_par import RunPar
from functional_par.vjp import Engine
from functional_par.zero.gathered import Resident, Weights

Key = tuple[int, int]
"""A stage and a microbatch."""


@dataclass
class Live:
    """What is kept of one microbatch on one stage between its actions.

    Attributes:
        backs: the backwards of the layers that have not run.
        later: weight gradients that wait for the action W.
        buffers: received memory to give back at the end.
    """

    backs: list[Backward] = field(default_factory=list)
    later: list[Pair] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)


class Executor:
    """Executes tasks in order, for one step.

    Args:
        part: what to run.
        world: for messages between stages.
        buffers: memory for what is received, the same in every step.
        engine: the differentiation engine.
        par: microbatch index to the ``par`` of that microbatch.
        leaves: this rank's parameters.
        scale: cotangent of the loss sum, used on the last stage.
        gradients: receives the gradients; None runs forward alone, and keeps nothing.
        recording: notes when each action ran.
        weights: has the parameters where they are not there all the time.
    """

    def __init__(
        self,
        part: Part,
        world: World,
        buffers: Buffers,
        engine: Engine,
        par: Callable[[int], RunPar],
        leaves: Mapping[str, Tensor],
        scale: Tensor,
        gradients: Accumulator | None,
        recording: Recording | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.part, self.world, self.buffers, self.engine = part, world, buffers, engine
        self.par, self.scale, self.gradients = par, scale, gradients
        self.held: Weights = Resident(leaves) if weights is None else weights
        self.recording = Recording() if recording is None else recording
        self.live: dict[Key, Live] = {}
        self.losses: dict[int, tuple[Tensor, Tensor]] = {}
        self._posted: dict[Message, list[Handle]] = {}
        self._held: dict[Message, list[Tensor]] = {}

    def run(self) -> list[tuple[Tensor, Tensor]]:
        """Run all tasks; returns (loss sum, count) of each microbatch, in order, on the rank of the last stage."""
        steps = {"F": self.forward, "B": self.backward, "I": self.backward, "W": self.weights}
        record = self.world.record
        for task in self.part.tasks:
            record.doing = _Doing(task.action)
            for message in task.posts:
                self._posted[message] = self._receive(message)
            taken = {message: self._take(message) for message in task.takes}
            self.recording.begin(task.action, self.world.device)
            with record.during("forward" if task.action.kind == "F" else "backward"):
                steps[task.action.kind](task, taken)
            self.recording.end(task.action, self.world.device)
        record.doing = ""  # left as it is by an error: the report of this rank says where it was
        return [self.losses[microbatch] for microbatch in sorted(self.losses)]

    def forward(self, task: Task, taken: Mapping[Message, list[Tensor]]) -> None:
        """Forward of one microbatch; keeps one backward a layer."""
        stage, microbatch = task.action.stage, task.action.microbatch
        chunk, par = self.part.chunks[stage], self.par(microbatch)
        live = Live()
        if self.gradients is not None:
            self.live[stage, microbatch] = live
            self.recording.count(len(self.live))
        x = self._inputs(stage, chunk, par, taken, live)
        for call in chunk.calls:
            self.held.enter(call.layer.name)
            x, back = call.forward(self.engine, self.held.leaves, x, par)
            x = self.held.leave(call.layer.name, x)
            live.backs.append(back)
        if stage == self.part.last:
            self.losses[microbatch] = self.buffers.owned(x[0]), self.buffers.owned(x[1])
        for message in task.sends:
            self._send(message, [x[each.output] for each in self._carried(message)])
        if self.gradients is None:
            self._finish(live)

    def backward(self, task: Task, taken: Mapping[Message, list[Tensor]]) -> None:
        """Backward of one microbatch: the layers in reverse, each dropped as soon as it has run."""
        stage, microbatch = task.action.stage, task.action.microbatch
        gradients = self._accumulator()
        chunk, live = self.part.chunks[stage], self.live[stage, microbatch]
        cotangents = self._cotangents(stage, chunk, taken, live)
        whole = task.action.kind == "B"
        for call in reversed(chunk.calls):
            later = None if whole else live.later
            self.held.enter(call.layer.name)
            cotangents = live.backs.pop()(cotangents, gradients, later)
            cotangents = self.held.leave(call.layer.name, cotangents, later)
            complete = Complete(call.trainable)
            complete.add_to(gradients) if whole else live.later.append(complete)
        where = [place for place, grad in enumerate(chunk.before.differentiable) if grad]
        by_place = dict(zip(where, cotangents, strict=True))
        for message in task.sends:
            self._send(message, [by_place[each.input] for each in self._carried(message)])
        if whole:
            self._finish(self.live.pop((stage, microbatch)))

    def weights(self, task: Task, taken: Mapping[Message, list[Tensor]]) -> None:
        """The weight gradients that an input-backward has left for later."""
        gradients = self._accumulator()
        live = self.live.pop((task.action.stage, task.action.microbatch))
        for pair in live.later:
            pair.add_to(gradients)
        self._finish(live)

    def _inputs(
        self, stage: int, chunk: Chunk, par: RunPar, taken: Mapping[Message, list[Tensor]], live: Live
    ) -> list[Tensor]:
        """The leaves of a stage's input: fields of the batch, what other stages sent, stand-ins for what it does not read."""
        fields = pytree.tree_leaves(dict(par.batch))
        arrived: dict[int, Tensor] = {}
        for message, tensors in taken.items():
            arrived |= {each.input: x for each, x in zip(self._carried(message), tensors, strict=True)}
            if not message.local:
                live.buffers += tensors
        x = []
        for place, (origin, leaf) in enumerate(zip(self.part.routes.inputs[stage], chunk.before.leaves, strict=True)):
            if origin is None:
                x.append(self.buffers.stand_in(leaf))
            else:
                x.append(fields[origin.place] if origin.stage == BATCH else arrived[place])
        return x

    def _cotangents(self, stage: int, chunk: Chunk, taken: Mapping[Message, list[Tensor]], live: Live) -> list[Tensor]:
        """A cotangent for each differentiable output; zeros where no later stage reads it."""
        if stage == self.part.last:
            return [self.scale]
        found: dict[int, Tensor] = {}
        for message, tensors in taken.items():
            for each, ct in zip(self._carried(message), tensors, strict=True):
                place = each.output
                found[place] = found[place] + ct if place in found else ct
            if not message.local:
                live.buffers += tensors
        return [
            found[place] if place in found else torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.world.device)
            for place, (leaf, grad) in enumerate(zip(chunk.after.leaves, chunk.after.differentiable, strict=True))
            if grad
        ]

    def _carried(self, message: Message) -> tuple[Carried, ...]:
        return self.part.carried[message.producer, message.consumer]

    def _receive(self, message: Message) -> list[Handle]:
        source = self.part.target[message.source]
        with self.world.record.during("forward" if message.forward else "backward"):
            return [
                self.world.recv(leaf.shape, leaf.dtype, source, out=self.buffers.take(leaf), what=message)
                for _, _, leaf in self._carried(message)
            ]

    def _take(self, message: Message) -> list[Tensor]:
        if message.local:
            return self._held.pop(message)
        return [handle.wait() for handle in self._posted.pop(message)]

    def _send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        owned = [self.buffers.owned(x) for x in tensors]
        if message.local:
            self._held[message] = owned
            return
        for x in owned:
            self.world.send(x, self.part.target[message.target])

    def _accumulator(self) -> Accumulator:
        if self.gradients is None:
            raise ScheduleError("a schedule with backwards was given where nothing takes the gradients.")
        return self.gradients

    def _finish(self, live: Live) -> None:
        self.buffers.give_back(live.buffers)


@dataclass(frozen=True)
class _Doing:
    """An action in words, when somebody asks."""

    action: Action

    def __str__(self) -> str:
        return self.action.words
