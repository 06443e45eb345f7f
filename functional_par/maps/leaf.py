"""``Leaf``: what a map on gradients or updates knows of the leaf it works on, and its collectives. One implementation runs,
the other infers kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from functional_par import random
from functional_par.comm.base import AllGather, AllReduce, Op, World
from functional_par.random import Key
from functional_par.spec import Spec, payers


class Leaf(ABC):
    """One leaf while a map acts on its gradient or update.

    Attributes:
        spec: its sharding annotation: path, global shape, names of dims, the axis that each is cut along. Gradient and
            parameter are this rank's block, without the padding that an uneven shard has in memory.
        owes: the axes over which the gradient that the map is given is a partial sum; empty after the reduction.
        param: this rank's shard of the parameter, before the update, in the dtype of the gradient or update.
        step: number of steps done.
        key: names the random numbers of this map, step and leaf: the same on every rank.
    """

    spec: Spec
    owes: tuple[str, ...]
    param: Tensor
    step: int
    key: Key

    @property
    def path(self) -> str:
        """Dotted path in the parameter tree."""
        return self.spec.path

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.spec.shape

    @abstractmethod
    def psum(self, x: Tensor, *axes: str) -> Tensor:
        """Sum over the ranks of the axes; over ``"pp"``, over the ranks that own the leaf. ``partial -> whole``.

        Without axes ``x`` itself, so that ``leaf.psum(x, *leaf.owes)`` always means the whole gradient.
        """

    @abstractmethod
    def amax(self, x: Tensor) -> Tensor:
        """Largest entry of the whole of ``x``, without dims. ``whole or cut -> whole``."""

    @abstractmethod
    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """The whole of what is cut along ``axis`` in ``dim``, of the size that it has in one process. ``cut -> whole``."""

    @abstractmethod
    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """This rank's block of what is whole, along an axis that the leaf is cut along: the inverse of ``all_gather``, with
        which any function of the whole leaf can be written. ``whole -> cut``."""

    @abstractmethod
    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, other ones at each step and for each map and leaf, the same on every rank and at every
        call of one step, in the dtype of the gradient."""

    @abstractmethod
    def approximate(self, x: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        """``by(x)``, which the author takes for ``x``: rounding, the largest entries, signs times a scale. The result has
        the kind of ``x``, though ``by`` is not linear."""

    def norm(self, x: Tensor) -> Tensor:
        """The 2-norm of the whole of ``x``, which is cut as the leaf is."""
        return self.psum(x.square().sum(), *self.spec.sharded).sqrt()


@dataclass(frozen=True)
class RunLeaf(Leaf):
    """Runs on real ranks."""

    world: World
    spec: Spec
    owes: tuple[str, ...]
    param: Tensor
    step: int
    key: Key
    dtype: torch.dtype

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        return self._start(AllReduce(), x, axes)

    def amax(self, x: Tensor) -> Tensor:
        least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        largest = x.amax() if x.numel() else x.new_full((), least)  # a shard of nothing but padding
        return self._start(AllReduce("max"), largest, self.spec.sharded)

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        dim, size = dim % x.ndim, getattr(self.world.mesh, axis)
        whole, part = extent(self.spec, axis, size)
        if whole == part * size:
            return self._start(AllGather(dim), x, (axis,))
        # Blocks of one size travel; the first rank's is full, and what the last ones lack is left out again.
        full = int(self._start(AllReduce("max"), torch.tensor(x.shape[dim], device=x.device), (axis,)))
        lacking = [full - x.shape[dim] if i == dim else n for i, n in enumerate(x.shape)]
        padded = torch.cat([x, x.new_zeros(lacking)], dim)
        return self._start(AllGather(dim), padded, (axis,)).narrow(dim, 0, full * whole // part)

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        whole, part = extent(self.spec, axis, getattr(self.world.mesh, axis))
        times, start = x.shape[dim] // whole, min(getattr(self.world.coords, axis) * part, whole)
        return x.narrow(dim, start * times, (min(start + part, whole) - start) * times)

    def normal(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return random.normal(self.key, torch.arange(count, device=self.world.device)).view(shape).to(self.dtype)

    def approximate(self, x: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        return by(x)

    def _start(self, op: Op, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        ranks = payers(self.world.mesh, self.world.rank, axes, self.spec.owners)
        return x if len(ranks) == 1 else self.world.subgroup(ranks, "+".join(axes)).start(op, x).wait()


def extent(spec: Spec, axis: str, size: int) -> tuple[int, int]:
    """Size of the dim that is cut along ``axis``, in the whole leaf and in a full shard of ``size`` ranks."""
    whole = spec.shape[spec.axes.index(axis)]
    return whole, -(-whole // size)
