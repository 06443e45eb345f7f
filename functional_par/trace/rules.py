"""Collectives as maps on types: from what varies to what is the same, and back. Each knows its transpose, which the
backward of a traced layer applies, so that derivatives taken inside a layer are followed too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from functional_par.comm.base import AllGather, AllReduce, AllToAll, Op, ReduceScatter
from functional_par.comm.base import Permute as PermuteOp
from functional_par.errors import SuperfluousCollective, TraceError
from functional_par.trace.follow import Typing
from functional_par.trace.place import Where
from functional_par.trace.values import Axes, Collective, Value, names, order


@dataclass(frozen=True, eq=False)
class Rule(ABC):
    """One call of a collective; opaque to torch.

    Attributes:
        typing: knows the values.
        active: the axes along which it communicates and that some transform uses.
        real: those of more than one rank, in mesh order.
        size: number of ranks along them.
        label: how the user wrote it.
        where: layer and line of the call.
    """

    typing: Typing
    active: Axes
    real: tuple[str, ...]
    size: int
    label: str
    where: Where

    differentiable: ClassVar[bool] = True
    consequence: ClassVar[str] = "there is nothing to exchange"

    def run(self, x: Tensor) -> Tensor:
        """A new meta tensor of the result's shape and type.

        Raises:
            SuperfluousCollective: for an input of the wrong type.
        """
        value = self.typing.value(x)
        try:
            after = self.typed(value)
        except TraceError:
            # Zeros and other constants of a backward belong to no rank.
            if not self.typing.backward or value.cotangent:
                raise
            after = value
        if not self.typing.backward:
            self.typing.keep(x)
        if self.real and (op := self.op) is not None:
            self.typing.called(self, Collective(op, self.real, x.nbytes))
        return self.typing.emit(self.shape(list(x.shape)), x, after)

    @abstractmethod
    def typed(self, value: Value) -> Value:
        """Type of the result."""

    @property
    def op(self) -> Op | None:
        """The operation between ranks that it is; None where nothing is sent."""
        return None

    @abstractmethod
    def dual(self) -> Rule:
        """The transpose."""

    @cached_property
    def transpose(self) -> Rule:
        """The dual, always the same one."""
        return self.dual()

    def shape(self, shape: list[int]) -> list[int]:
        """Shape of the result."""
        return shape

    def batched(self) -> Rule:
        """The same on values with one more dim in front."""
        return self

    def become(self, kind: type[Rule], **more: Any) -> Rule:
        """A rule of another kind about the same axes, for the transpose."""
        label = self.label if self.label.startswith("the transpose") else f"the transpose of {self.label}"
        return kind(self.typing, self.active, self.real, self.size, label, self.where, **more)

    def varying(self, value: Value) -> None:
        """Refuse a value that does not vary over all the axes, or that varies by its type alone."""
        if same := order(self.active - value.axes):
            self.refuse(
                f"{self.label} over {names(same)} of a value that is already the same on every rank of {names(same)}; "
                f"{self.consequence.format(' * '.join(same))}. Leave {names(same)} out."
            )
        if (copies := order(self.active & value.alike)) and not self.typing.backward:
            self.refuse(
                f"{self.label} over {names(copies)} of copies: the value went through par.pvary or par.all_gather, but "
                f"nothing that differs along {names(copies)} has entered it since, so every rank of {names(copies)} holds the "
                f"same; {self.consequence.format(' * '.join(copies))}. If a weight in it was meant to be cut, give its dim a "
                "name that shard_tp cuts (program.explain(mesh) shows what is cut); else leave the collective out, and gather "
                'with to="replicated".'
            )

    def refuse(self, message: str) -> NoReturn:
        raise SuperfluousCollective(f"{self.where}: {message}")


class Sum(Rule):
    """``psum``: varying -> replicated."""

    consequence = "a sum would be {} times too large"

    @property
    def op(self) -> Op:
        return AllReduce()

    def typed(self, value: Value) -> Value:
        self.varying(value)
        return _made_same(value, self.active)

    def dual(self) -> Rule:
        return self.become(Vary)


class Max(Rule):
    """``pmax``: varying -> replicated, without a derivative."""

    differentiable = False

    @property
    def op(self) -> Op:
        return AllReduce("max")

    def typed(self, value: Value) -> Value:
        self.varying(value)
        axes, alike = value.axes - self.active, value.alike - self.active
        return Value(axes, alike, data=value.data, cotangent=value.cotangent)

    def dual(self) -> Rule:
        raise NotImplementedError("pmax has no derivative")


@dataclass(frozen=True, eq=False)
class Vary(Rule):
    """``pvary``: replicated -> varying.

    Attributes:
        hint: what else to do about a value that already differs.
    """

    hint: str = ""

    def typed(self, value: Value) -> Value:
        if already := names(order(self.active & value.axes)):
            self.refuse(
                f"{self.label} over {already} of a value that already differs along {already}; its cotangent would be "
                f"summed once too often. Leave {already} out{self.hint}."
            )
        return replace(value, axes=value.axes | self.active, alike=value.alike | self.active)

    def dual(self) -> Rule:
        return self.become(Sum)


@dataclass(frozen=True, eq=False)
class Gather(Rule):
    """``all_gather``: varying -> varying or replicated."""

    dim: int
    replicated: bool

    @property
    def op(self) -> Op:
        return AllGather(self.dim)

    def typed(self, value: Value) -> Value:
        self.varying(value)
        return _made_same(value, self.active) if self.replicated else replace(value, alike=value.alike | self.active)

    def shape(self, shape: list[int]) -> list[int]:
        return resized(shape, self.dim, shape[self.dim] * self.size)

    def dual(self) -> Rule:
        return self.become(Slice if self.replicated else Scatter, dim=self.dim)

    def batched(self) -> Rule:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Slice(Rule):
    """``slice``: replicated -> varying."""

    dim: int

    def typed(self, value: Value) -> Value:
        if already := names(order(self.active & value.axes)):
            self.refuse(
                f"{self.label} over {already} of a value that differs along {already}: every rank would cut another tensor. "
                "Use par.reduce_scatter for partial sums, or par.take for a window of a rank's own value."
            )
        return replace(value, axes=value.axes | self.active)

    def shape(self, shape: list[int]) -> list[int]:
        return resized(shape, self.dim, shape[self.dim] // self.size)

    def dual(self) -> Rule:
        return self.become(Gather, dim=self.dim, replicated=True)

    def batched(self) -> Rule:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Scatter(Rule):
    """``reduce_scatter``: varying -> varying."""

    dim: int

    consequence = "a sum would be {} times too large"

    @property
    def op(self) -> Op:
        return ReduceScatter(self.dim)

    def typed(self, value: Value) -> Value:
        self.varying(value)
        return _differing(value, self.active)

    def shape(self, shape: list[int]) -> list[int]:
        return resized(shape, self.dim, shape[self.dim] // self.size)

    def dual(self) -> Rule:
        return self.become(Gather, dim=self.dim, replicated=False)

    def batched(self) -> Rule:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Take(Rule):
    """``take``: any -> varying. A replicated leaf owes, a replicated activation is refused."""

    dim: int
    length: int
    full: int

    def typed(self, value: Value) -> Value:
        axes = value.axes | self.active
        taken = replace(_differing(value, self.active), axes=axes)
        if self.typing.backward or not value.grad:
            return taken
        return replace(taken, sources=self.typing.meet(value, axes - value.axes))

    def shape(self, shape: list[int]) -> list[int]:
        return resized(shape, self.dim, self.length)

    def dual(self) -> Rule:
        return self.become(Place, dim=self.dim, length=self.length, full=self.full)

    def batched(self) -> Rule:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True, eq=False)
class Place(Take):
    """The window in zeros: any -> varying."""

    def shape(self, shape: list[int]) -> list[int]:
        return resized(shape, self.dim, self.full)

    def dual(self) -> Rule:
        return self.become(Take, dim=self.dim, length=self.length, full=self.full)


@dataclass(frozen=True, eq=False)
class Exchange(Rule):
    """``all_to_all``: varying -> varying."""

    split: int
    concat: int

    @property
    def op(self) -> Op:
        return AllToAll(self.split, self.concat)

    def typed(self, value: Value) -> Value:
        self.varying(value)
        return value

    def shape(self, shape: list[int]) -> list[int]:
        shape = resized(shape, self.split, shape[self.split] // self.size)
        return resized(shape, self.concat, shape[self.concat] * self.size)

    def dual(self) -> Rule:
        return self.become(Exchange, split=self.concat, concat=self.split)

    def batched(self) -> Rule:
        return replace(self, split=self.split + 1, concat=self.concat + 1)


@dataclass(frozen=True, eq=False)
class Permute(Rule):
    """``ppermute``: varying -> varying."""

    to: tuple[int, ...]

    @property
    def op(self) -> Op:
        return PermuteOp(self.to)

    def typed(self, value: Value) -> Value:
        self.varying(value)
        return value

    def dual(self) -> Rule:
        return self.become(Permute, to=tuple(self.to.index(i) for i in range(len(self.to))))


def resized(shape: list[int], dim: int, size: int) -> list[int]:
    """The shape with another size in one dim."""
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _made_same(value: Value, axes: Axes) -> Value:
    closed = value.closed | axes if value.sources else value.closed
    return replace(value, axes=value.axes - axes, alike=value.alike - axes, closed=closed, mixed=value.mixed - axes)


def _differing(value: Value, axes: Axes) -> Value:
    return replace(value, alike=value.alike - axes)
