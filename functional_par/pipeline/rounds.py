"""Runs every layer of a model forward and backward in one process, one after the other, and looks at what each takes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.capture import Pair
from functional_par.model import init_leaf
from functional_par.pipeline.products import NONE
from functional_par.pipeline.stage import Call
from functional_par.plan import Plan
from functional_par.run_par import RunPar
from functional_par.vjp import Engine, tape_vjp
from functional_par.vjp import engine as find_engine

T = TypeVar("T")

Seconds = tuple[float, float, float]
"""Of forward, of the backward to the input, and of the weight gradients that it has left for later."""


@dataclass
class Sink:
    """Where the gradients of one layer add up."""

    leaves: dict[str, Tensor] = field(default_factory=dict)

    def add(self, grads: Mapping[str, Tensor]) -> None:
        """Add the gradients of the layer for one microbatch."""
        for path, grad in grads.items():
            self.leaves[path].add_(grad)

    def buffer(self, path: str) -> tuple[Tensor, bool]:
        """The memory of a leaf's gradient."""
        return self.leaves[path], False

    def done(self, paths: Sequence[str]) -> None:
        """Nothing waits for the end of a layer."""


@dataclass(frozen=True)
class Rounds:
    """Rounds through the layers of a plan with one stage. Layers that share a function and all shapes run once a round;
    parameters and gradients are made once for each such kind of layer.

    Attributes:
        plan: what the layers read.
        calls: the layers in order.
        par: of the microbatch.
        dtype: of parameters.
    """

    plan: Plan
    calls: tuple[Call, ...]
    par: RunPar
    dtype: torch.dtype
    _made: dict[Any, tuple[dict[str, Tensor], Sink]] = field(default_factory=dict)

    def seconds(self, engine: str) -> dict[str, Seconds]:
        """How long each layer takes."""
        return self._each(lambda call, x: self._timed(call, x, find_engine(engine)))

    def saved(self) -> dict[str, int]:
        """Bytes that each layer keeps for backward; what is there anyway, parameters and batch, is not counted."""
        return self._each(self._counted)

    def _each(self, run: Callable[[Call, list[Tensor]], tuple[T, list[Tensor]]]) -> dict[str, T]:
        """What ``run`` says of each layer on the output of the one before, which it returns."""
        kinds = [self._kind(call) for call in self.calls]
        found: dict[Any, T] = {}
        outputs: dict[Any, list[Tensor]] = {}
        x = list(pytree.tree_leaves(dict(self.par.batch)))
        for i, (call, kind) in enumerate(zip(self.calls, kinds, strict=True)):
            if kind not in found:
                found[kind], outputs[kind] = run(call, x)
            x = outputs[kind] if kind in kinds[i + 1 :] else outputs.pop(kind)
        return {call.layer.name: found[kind] for call, kind in zip(self.calls, kinds, strict=True)}

    def _kind(self, call: Call) -> Any:
        """What two layers share that take the same time."""
        numbers = {path: i for i, path in enumerate(call.layer.paths)}
        reads = tuple((read.local, numbers[read.path]) for read in call.layer.reads)
        leaves = tuple((self.plan.specs[path].shape, path in call.trainable) for path in call.layer.paths)
        inputs = tuple((leaf.shape, leaf.dtype) for leaf in call.before.leaves)
        edges = call.before.differentiable, call.after.differentiable
        return id(call.layer.fn), reads, leaves, inputs, edges, call.policy

    def _leaves(self, call: Call) -> tuple[dict[str, Tensor], Sink]:
        kind = self._kind(call)
        if kind not in self._made:
            leaves = {}
            for path in call.layer.paths:
                leaf = self.plan.model.leaves[path]
                leaves[path] = init_leaf(0, path, leaf, (0,) * len(leaf.shape), leaf.shape, self.dtype, "cpu")
            wide = torch.promote_types(self.dtype, torch.float32)
            sink = Sink({path: torch.zeros_like(leaves[path], dtype=wide) for path in call.trainable})
            self._made[kind] = leaves, sink
        made, sink = self._made[kind]
        names = dict(zip(made, call.layer.paths, strict=True))
        return {names[path]: x for path, x in made.items()}, Sink({names[p]: x for p, x in sink.leaves.items()})

    def _timed(self, call: Call, x: list[Tensor], engine: Engine) -> tuple[Seconds, list[Tensor]]:
        leaves, sink = self._leaves(call)
        start = perf_counter()
        outputs, back = call.forward(engine, leaves, x, self.par)
        forward = perf_counter() - start
        cotangents = _cotangents(outputs, call.after.differentiable)
        later: list[Pair] = []
        start = perf_counter()
        back(cotangents, sink, later)
        backward = perf_counter() - start
        del back
        start = perf_counter()
        for pair in later:
            pair.add_to(sink)
        return (forward, backward, perf_counter() - start), outputs

    def _counted(self, call: Call, x: list[Tensor]) -> tuple[int, list[Tensor]]:
        leaves, sink = self._leaves(call)
        keepers = Keepers([*leaves.values(), *self.par.batch.values()])
        # Of a layer that runs again no graph is left, which the hook would keep alive: an output that is saved holds its graph.
        hooks = torch.autograd.graph.saved_tensors_hooks(keepers.pack, Kept.unpack)
        with hooks if call.policy == NONE else nullcontext():
            outputs, back = call.forward(tape_vjp, leaves, x, self.par)
        saved = keepers.bytes(back.held())
        back(_cotangents(outputs, call.after.differentiable), sink, None)
        return saved, outputs


@dataclass(frozen=True, eq=False)
class Kept:
    """A tensor that autograd has saved, for as long as its graph lives."""

    x: Tensor

    def unpack(self) -> Tensor:
        return self.x


class Keepers:
    """Notes what is saved while its hook is on; memory of the tensors ``apart`` is not counted."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self.apart = {x.untyped_storage()._cdata for x in apart}
        self.seen: list[weakref.ref[Kept]] = []

    def pack(self, x: Tensor) -> Kept:
        """The hook of ``torch.autograd.graph.saved_tensors_hooks``."""
        kept = Kept(x)
        self.seen.append(weakref.ref(kept))
        return kept

    def bytes(self, others: Iterable[Tensor] = ()) -> int:
        """Bytes that are alive now, those of ``others`` with them, each storage once."""
        seen = [kept.x for ref in self.seen if (kept := ref()) is not None]
        storages = [x.untyped_storage() for x in (*seen, *others)]
        return sum({s._cdata: s.nbytes() for s in storages if s._cdata not in self.apart}.values())


def _cotangents(outputs: Sequence[Tensor], differentiable: Sequence[bool]) -> list[Tensor]:
    return [torch.ones_like(y) for y, carries in zip(outputs, differentiable, strict=True) if carries]
