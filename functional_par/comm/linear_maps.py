"""The linear maps between the values of a group, each with its dual. ``collectives`` makes them differentiable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from torch import Tensor

from functional_par.comm.base import AllGather, AllReduce, AllToAll, Group, Permute, ReduceScatter


@dataclass(frozen=True, eq=False)
class LinearMap(ABC):
    """A linear map between the values of a group; opaque to torch, which would copy tuples and dicts as pytrees."""

    group: Group

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The result, never a modified input."""

    @abstractmethod
    def dual(self) -> LinearMap:
        """The transpose; its own dual is this map again."""

    def batched(self) -> LinearMap:
        """The same map on values with one more dim in front."""
        return self


class Sum(LinearMap):
    def run(self, x: Tensor) -> Tensor:
        return self.group.start(AllReduce(), x).wait()

    def dual(self) -> LinearMap:
        return Vary(self.group)


class Vary(LinearMap):
    def run(self, x: Tensor) -> Tensor:
        return x.view_as(x)

    def dual(self) -> LinearMap:
        return Sum(self.group)


@dataclass(frozen=True, eq=False)
class Gather(LinearMap):
    dim: int
    replicated: bool

    def run(self, x: Tensor) -> Tensor:
        return self.group.start(AllGather(self.dim), x).wait()

    def dual(self) -> LinearMap:
        return Slice(self.group, self.dim) if self.replicated else Scatter(self.group, self.dim)

    def batched(self) -> LinearMap:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Slice(LinearMap):
    dim: int

    def run(self, x: Tensor) -> Tensor:
        length = x.shape[self.dim] // self.group.size
        return x.narrow(self.dim, self.group.index * length, length)

    def dual(self) -> LinearMap:
        return Gather(self.group, self.dim, replicated=True)

    def batched(self) -> LinearMap:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Take(LinearMap):
    dim: int
    start: int
    length: int
    full: int

    def run(self, x: Tensor) -> Tensor:
        return x.narrow(self.dim, self.start, self.length)

    def dual(self) -> LinearMap:
        return Place(self.group, self.dim, self.start, self.length, self.full)

    def batched(self) -> LinearMap:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Place(LinearMap):
    dim: int
    start: int
    length: int
    full: int

    def run(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = self.full
        out = x.new_zeros(shape)
        out.narrow(self.dim, self.start, self.length).copy_(x)
        return out

    def dual(self) -> LinearMap:
        return Take(self.group, self.dim, self.start, self.length, self.full)

    def batched(self) -> LinearMap:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Scatter(LinearMap):
    dim: int

    def run(self, x: Tensor) -> Tensor:
        return self.group.start(ReduceScatter(self.dim), x).wait()

    def dual(self) -> LinearMap:
        return Gather(self.group, self.dim, replicated=False)

    def batched(self) -> LinearMap:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Exchange(LinearMap):
    split: int
    concat: int

    def run(self, x: Tensor) -> Tensor:
        return self.group.start(AllToAll(self.split, self.concat), x).wait()

    def dual(self) -> LinearMap:
        return Exchange(self.group, self.concat, self.split)

    def batched(self) -> LinearMap:
        return replace(self, split=self.split + 1, concat=self.concat + 1)


@dataclass(frozen=True, eq=False)
class Permutation(LinearMap):
    to: tuple[int, ...]

    def run(self, x: Tensor) -> Tensor:
        return self.group.start(Permute(self.to), x).wait()

    def dual(self) -> LinearMap:
        return Permutation(self.group, tuple(self.to.index(i) for i in range(len(self.to))))
