"""Follows the operations of one layer on meta tensors and gives each value its type: the axes over which it varies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from functional_par.errors import MissingCollective, ModelError
from functional_par.mesh import AXES
from functional_par.trace.place import Place, here

Axes = frozenset[str]
NONE: Axes = frozenset()

_CONSTANTS = {
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided",
}  # fmt: skip

_TOUCH = 8
"""Floating-point operations that take about as long as reading and writing one element."""


@dataclass(frozen=True)
class Source:
    """A leaf, on the way to which a value has come to owe ``owed``."""

    path: str
    owed: Axes = NONE


@dataclass(frozen=True)
class Value:
    """What the trace knows of one tensor.

    Attributes:
        axes: the axes over which it varies.
        grad: whether a cotangent flows back into it.
        data: whether it was computed from the batch (activations are), as opposed to parameters and constants alone.
        sources: the leaves that it is a function of, while it depends on nothing but leaves and constants.
        closed: axes over which something on the way from its sources varied and was then made the same again; a debt
            over these can no longer be carried back to the leaf.
    """

    axes: Axes = NONE
    grad: bool = False
    data: bool = False
    sources: frozenset[Source] = frozenset()
    closed: Axes = NONE


CONSTANT = Value()


@dataclass(frozen=True)
class Abstract:
    """Shape, dtype and type of one leaf of a traced pytree."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Value = CONSTANT

    def empty(self) -> Tensor:
        """A meta tensor of this shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Use:
    """One place where a leaf, or a function of leaves alone, meets data."""

    source: Source
    layer: str
    place: Place

    def __str__(self) -> str:
        return f"layer {self.layer!r}, {self.place}"


class Typing(TorchDispatchMode):
    """Follows every torch operation of one layer and gives each result its ``Value``."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.layer = layer
        self.values: Any = WeakIdKeyDictionary()
        self.kept: dict[int, Tensor] = {}
        self.uses: list[Use] = []
        self.work = 0

    def input(self, leaf: Abstract) -> Tensor:
        """A meta tensor that stands for an input of the layer, which the layer must not modify."""
        x = leaf.empty()
        self.values[x] = leaf.value
        self.keep(x)
        return x

    def keep(self, x: Tensor) -> None:
        """From here on modifying ``x`` in place is an error."""
        self.kept[x.untyped_storage()._cdata] = x

    def value(self, x: Tensor) -> Value:
        """What is known of a tensor; one that nobody introduced is a constant."""
        known = self.values.get(x)
        if known is None and x.requires_grad:
            raise ModelError(
                f"{self.where()}: the layer closes over a tensor of shape {list(x.shape)} that requires a gradient. "
                "It would get none: make it a leaf of params and name it in the layer's paths."
            )
        return known or CONSTANT

    def abstract(self, x: Any) -> Any:
        """Shape, dtype and value of an output leaf."""
        return Abstract(tuple(x.shape), x.dtype, self.value(x)) if isinstance(x, Tensor) else x

    def emit(self, shape: Iterable[int], like: Tensor, value: Value) -> Tensor:
        """A new meta tensor with a value of its own."""
        out = torch.empty(tuple(shape), dtype=like.dtype, device="meta")
        self.values[out] = value
        return out

    def where(self) -> str:
        return f"layer {self.layer!r}, {here()}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModelError(
                f"{self.where()}: {func} draws from torch's global generator, so the result would depend on the rank and "
                "on what ran before. Draw with functional_par.random, whose numbers follow from a key and an index."
            )
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        values = [self.value(x) for x in tensors]
        if func._schema.is_mutable:
            self._check_pure(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        out = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        self._count(func, args, kwargs, out, results)
        constant = name in _CONSTANTS
        differentiable = not constant and any(x.is_floating_point() or x.is_complex() for x in results)
        value = self._constant(name, values) if not differentiable else self.combine(values)
        if func._schema.is_mutable:
            self._write(func, args, kwargs, value)
        for result in results:
            floating = result.is_floating_point() or result.is_complex()
            self.values[result] = value if floating else replace(value, grad=False, sources=frozenset())
        return out

    def combine(self, values: list[Value]) -> Value:
        """The value of a differentiable operation's result; notes uses, and refuses what must not meet."""
        axes = frozenset().union(*(v.axes for v in values))
        data = any(v.data for v in values)
        sources: set[Source] = set()
        for v in values:
            if v.grad:
                sources |= self.meet(v, axes - v.axes)
        if data:
            place = here() if sources else None
            self.uses += [Use(source, self.layer, place) for source in sources if place]
            sources = set()
        closed = frozenset().union(*(v.closed for v in values))
        return Value(axes, any(v.grad for v in values), data, frozenset(sources), closed)

    def meet(self, v: Value, missing: Axes) -> set[Source]:
        """Sources of ``v`` after it has met values that vary over the axes ``missing`` from its own."""
        if missing and (not v.sources or missing & v.closed):
            axis = order(missing)
            quoted = ", ".join(map(repr, axis))
            what = "an activation" if not v.sources else "a value gathered or summed from parameters"
            raise MissingCollective(
                f"{self.where()}: {what} that is the same on every rank of {names(axis)} meets values that differ along "
                f"{names(axis)}. Its cotangent would be a partial sum that nobody adds up. If the values that differ are "
                f"partial sums, they lack par.psum(..., {quoted}); if not, write par.pvary(..., {quoted}) around the value "
                "that is the same, before it is used here."
            )
        return {Source(s.path, s.owed | missing) for s in v.sources}

    def _constant(self, name: str, values: list[Value]) -> Value:
        """The value of a result into which no cotangent flows."""
        if name in _CONSTANTS and name != "detach":
            return CONSTANT
        return Value(frozenset().union(*(v.axes for v in values)), data=any(v.data for v in values))

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        schema = func._schema.arguments
        named = [kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(schema)]
        written = [value for a, value in zip(schema, named, strict=True) if a.alias_info and a.alias_info.is_write]
        return [x for x in pytree.tree_leaves(written) if isinstance(x, Tensor)]

    def _check_pure(self, func: Any, args: Any, kwargs: Any) -> None:
        for x in self._written(func, args, kwargs):
            if x.untyped_storage()._cdata in self.kept:
                raise ModelError(
                    f"{self.where()}: {func._schema.name.removeprefix('aten::')} modifies an input of the layer, or a "
                    "tensor that was handed to a collective, in place. Layers are pure functions: write to a clone."
                )

    def _write(self, func: Any, args: Any, kwargs: Any, value: Value) -> None:
        """An in-place operation gives its value to every tensor that shares the memory."""
        for x in self._written(func, args, kwargs):
            storage = x.untyped_storage()._cdata
            for alias in list(self.values):
                if alias.untyped_storage()._cdata == storage:
                    self.values[alias] = value
            self.values[x] = value

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        """Add the floating-point operations of matrix products and, for anything else that is not a view, the cost of
        touching every element."""
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.work += int(formula(*args, **kwargs, out_val=out))
        elif not any(a.alias_info for a in func._schema.returns):
            self.work += _TOUCH * sum(x.numel() for x in results)


def _to_meta(x: Tensor) -> Tensor:
    return x if x.device.type == "meta" else x.to("meta")


def order(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in set(axes))


def names(axes: Iterable[str]) -> str:
    return " and ".join(axes)
