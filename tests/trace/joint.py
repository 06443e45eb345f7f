"""The program of all ranks as one function of the logical parameters, in one autograd graph: what gradients have to be.

Ranks are threads that meet at every collective and compute it with plain torch operations on the tensors of all ranks,
which stay in the graph. No transpose, no type and no debt is written down anywhere: autograd finds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_par as fp
from functional_par import tree
from functional_par.model import LOSS, Model
from functional_par.par import Par, TensorParallelMode, merge_axes, row_count
from functional_par.plan import Plan
from functional_par.random import Key
from functional_par.run_par import step_key
from functional_par.spec import Spec


@dataclass(frozen=True)
class Joint:
    """The function and its derivative.

    Attributes:
        losses: of each rank, in rank order: the sum of its rows.
        loss: over all replicas and terms, from one rank of each replica.
        grads: derivative of ``loss`` by each trainable leaf, whole.
        calls: what was exchanged, in the order of the program.
    """

    losses: tuple[Tensor, ...]
    loss: Tensor
    grads: Mapping[str, Tensor]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Call:
    """One collective: its name, its axes, those along which all ranks handed in the same numbers, and whether these have a
    derivative."""

    name: str
    axes: tuple[str, ...]
    same: frozenset[str]
    grad: bool


class Meeting:
    """Where the threads of all ranks exchange what they hold, in lock step."""

    def __init__(self, ranks: int, timeout: float = 30.0) -> None:
        self.barrier = threading.Barrier(ranks, timeout=timeout)
        self.held: list[Any] = [None] * ranks

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """What every rank holds, in rank order."""
        self.held[rank] = mine
        self.barrier.wait()
        found = list(self.held)
        self.barrier.wait()
        return found


def in_lock_step(main: Callable[[int], Any], meeting: Meeting) -> list[Any]:
    """Run ``main(rank)`` on a thread for each rank; raises what the first of them raised."""
    ranks = len(meeting.held)
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = main(rank)
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return results


@dataclass(frozen=True)
class JointPar(Par):
    """Collectives in plain operations on the tensors of all ranks."""

    mesh: fp.Mesh
    rank: int
    meeting: Meeting
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    mode: TensorParallelMode = TensorParallelMode.ALL_REDUCE
    async_comm: bool = False
    key: Key = field(default_factory=lambda: step_key(0, 0))
    layer: str = ""
    first_row: int = 0
    calls: list[Call] = field(default_factory=list)

    @property
    def layer_key(self) -> Key:
        return self.key.fold(self.layer)

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.first_row, self.first_row + row_count(self))

    def size(self, axis: str) -> int:
        return self.mesh.sizes[merge_axes((axis,))[0]]

    def index(self, axis: str) -> int:
        return int(getattr(self.mesh.coords(self.rank), axis))

    def axis_index(self, axis: str) -> Tensor:
        return torch.tensor(self.index(axis))

    def everyones(self, name: str, x: Tensor, *axes: str) -> list[Tensor]:
        """``x`` of each rank of this rank's group."""
        merged = merge_axes(axes)
        held = self.meeting.exchange(self.rank, (name, merged, x))
        if any(entry[:2] != (name, merged) for entry in held):
            raise RuntimeError(f"ranks met in different collectives: {[entry[:2] for entry in held]}")
        xs = [entry[2] for entry in held]
        same = frozenset(axis for axis in merged if same_along(self.mesh, xs, axis))
        self.calls.append(Call(name, merged, same, x.requires_grad))
        return [xs[rank] for rank in self.mesh.group(*merged, rank=self.rank)]

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        return torch.stack(self.everyones("psum", x, *axes)).sum(0)

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        return torch.stack(self.everyones("pmax", x.detach(), *axes)).amax(0)

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        self.everyones("pvary", x, *axes)
        return x

    def all_gather(self, x: Tensor, axis: str, dim: int, to: str = "varying") -> Tensor:
        return torch.cat(self.everyones("all_gather", x, axis), dim)

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        self.everyones("slice", x, axis)
        return x.chunk(self.size(axis), dim)[self.index(axis)]

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        return x.narrow(dim, starts[self.index(axis)], length)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        total = torch.stack(self.everyones("reduce_scatter", x, axis)).sum(0)
        return total.chunk(self.size(axis), dim)[self.index(axis)]

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        xs = self.everyones("all_to_all", x, axis)
        return torch.cat([x.chunk(self.size(axis), split)[self.index(axis)] for x in xs], concat)

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        return self.everyones("ppermute", x, axis)[to.index(self.index(axis))]

    def kernel(self, definition: Any, fast: Any) -> Any:
        return definition

    def check_stream(self, x: Tensor, what: str) -> None:
        pass

    def group(self, axis: str) -> Any:
        raise RuntimeError("the joint function has no groups")


def same_along(mesh: fp.Mesh, xs: Sequence[Tensor], axis: str) -> bool:
    """Whether the tensors of ranks that differ along the axis alone are equal, up to the order of sums."""
    groups = [[xs[rank].detach() for rank in group] for group in mesh.groups(axis)]
    return all(torch.allclose(x.double(), group[0].double(), rtol=1e-9, atol=1e-12) for group in groups for x in group)


def arranged(model: Model, mesh: fp.Mesh, transforms: Sequence[Any]) -> Plan:
    """Where leaves and rows lie under transforms, without any check."""
    plan = Plan.start(model, mesh, {})
    for transform in transforms:
        plan = transform(plan)
    return plan


def piece(plan: Plan, spec: Spec, whole: Tensor, rank: int) -> Tensor:
    """A rank's chunk of a leaf, padded with zeros, as a function of the leaf."""
    coords = plan.mesh.coords(rank)
    for dim, axis in enumerate(spec.axes):
        if axis is not None:
            n = getattr(plan.mesh, axis)
            size = -(-whole.shape[dim] // n)
            after = [0, 0] * (whole.ndim - dim - 1)
            padded = F.pad(whole, (*after, 0, n * size - whole.shape[dim]))
            whole = padded.narrow(dim, getattr(coords, axis) * size, size)
    return whole


def joint(
    plan: Plan, batch: Mapping[str, Tensor], model_of: Callable[[int], Model] | None = None, seed: int = 0
) -> Joint:
    """Loss and gradients of the joint function in float64.

    Args:
        plan: where leaves and rows lie; nothing else of it is used.
        batch: of all replicas.
        model_of: the model that a rank runs; by default the plan's on every rank.
        seed: of the parameters.
    """
    model, mesh = plan.model, plan.mesh
    leaves = {path: x.requires_grad_(model.leaves[path].trainable) for path, x in whole_leaves(model, seed).items()}
    meeting = Meeting(mesh.size)
    calls: list[list[Call]] = [[] for _ in range(mesh.size)]

    def main(rank: int) -> Tensor:
        own = {path: piece(plan, plan.specs[path], x, rank) for path, x in leaves.items()}
        rows, first = share(plan, batch, rank)
        par = JointPar(mesh, rank, meeting, rows, plan.mode, key=step_key(seed, 0), first_row=first, calls=calls[rank])
        return evaluate(model_of(rank) if model_of else model, own, par)

    losses = in_lock_step(main, meeting)
    replicas = [losses[rank] for rank in range(mesh.size) if is_first(plan, rank)]
    loss = torch.stack(replicas).sum() / max(int(model.count_terms(batch)), 1)
    wanted = {path: x for path, x in leaves.items() if x.requires_grad}
    whole = loss + 0.0 * torch.stack([x.sum() for x in wanted.values()]).sum()
    grads = torch.autograd.grad(whole, list(wanted.values()))
    detached = tuple(x.detach() for x in losses)
    return Joint(detached, loss.detach(), dict(zip(wanted, grads, strict=True)), tuple(calls[0]))


def whole_leaves(model: Model, seed: int = 0) -> dict[str, Tensor]:
    """All leaves, whole, in float64."""
    return tree.flatten(model.init(seed, torch.float64))


def share(plan: Plan, batch: Mapping[str, Tensor], rank: int) -> tuple[dict[str, Tensor], int]:
    """A rank's rows of a batch, and the index of the first."""
    own = {name: x.chunk(plan.replicas)[plan.replica(rank)] for name, x in batch.items()}
    return own, plan.replica(rank) * len(next(iter(own.values())))


def evaluate(model: Model, leaves: Mapping[str, Tensor], par: Any) -> Tensor:
    """The sum that one rank's loss returns."""
    x: Any = par.batch
    for layer in model.layers:
        x = layer.fn(layer.select(leaves), x, _within(par, layer.name))
    return model.loss.fn(model.loss.select(leaves), x, _within(par, LOSS))[0]


def _within(par: Any, layer: str) -> Any:
    return replace(par, layer=layer) if isinstance(par, JointPar) else par.within(layer)


def is_first(plan: Plan, rank: int) -> bool:
    """Whether the rank speaks for its replica."""
    coords = plan.mesh.coords(rank)._asdict()
    return all(index == 0 for axis, index in coords.items() if axis not in plan.data_axes)
