"""Follows a map on meta tensors and gives every result its ``Kind``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from functional_par.errors import ModelError, SuperfluousCollective
from functional_par.maps import rules
from functional_par.maps.leaf import Leaf
from functional_par.maps.types import WHOLE, Kind, listed, need_no_sum
from functional_par.random import Key
from functional_par.random import key as make_key
from functional_par.spec import Spec

_META = torch.device("meta")


class Following(TorchDispatchMode):
    """Knows the kind of every tensor of one map. A tensor that the map brings along is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Any = WeakIdKeyDictionary()

    def kind(self, x: Tensor) -> Kind:
        return self.kinds.get(x, WHOLE)

    def note(self, x: Tensor, kind: Kind) -> Tensor:
        self.kinds[x] = kind
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise ModelError(
                f"{func._schema.name.removeprefix('aten::')} changes a tensor in place. Maps are pure functions: use a new "
                "name for the result."
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModelError(
                f"{func._schema.name.removeprefix('aten::')} draws from torch's global generator, so the ranks would differ. "
                "Use leaf.normal, or functional_par.random with leaf.key."
            )
        schema = func._schema.arguments
        given = {a.name: args[i] if i < len(args) else (kwargs or {}).get(a.name) for i, a in enumerate(schema)}
        bound = {a.name: a.default_value if given[a.name] is None else given[a.name] for a in schema}
        args, kwargs = pytree.tree_map_only(Tensor, _on_meta, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        out = func(*args, **kwargs)
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.note(x, rules.result(func, bound, self.kind, x))
        return out


@dataclass(frozen=True)
class TraceLeaf(Leaf):
    """Infers kinds.

    Attributes:
        typing: knows the kinds.
        used: the axes of each collective, collected.
    """

    typing: Following
    spec: Spec
    owes: tuple[str, ...]
    param: Tensor
    sizes: Callable[[str], int]
    dtype: torch.dtype
    step: int = 0
    key: Key = field(default_factory=lambda: make_key(0))
    used: set[tuple[str, ...]] = field(default_factory=set)

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        kind = self._known("psum", x, axes)
        if cut := frozenset(axes) & kind.axes:
            raise SuperfluousCollective(
                f"leaf.psum over {listed(cut)} of a value that is cut along {listed(cut)}: it would add different parts of the "
                "leaf. Sum over the cut dim first, or use leaf.all_gather."
            )
        if extra := frozenset(axes) - kind.partial:
            raise SuperfluousCollective(
                f"leaf.psum over {listed(extra)} of a value that is {kind}: nobody owes that sum, and the result would be "
                f"{' * '.join(a for a in axes if a in extra)} times too large. Leave {listed(extra)} out; leaf.owes has the "
                "axes over which the gradient is a partial sum."
            )
        return self._emit(x.shape, x.dtype, Kind(kind.partial - frozenset(axes), kind.cut), axes)

    def amax(self, x: Tensor) -> Tensor:
        need_no_sum("leaf.amax", [self._known("amax", x, ())])
        return self._emit((), x.dtype, WHOLE, self.spec.sharded)

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        kind, dim = self._known("all_gather", x, (axis,)), dim % max(x.ndim, 1)
        if (axis, dim) not in kind.cut:
            raise SuperfluousCollective(
                f"leaf.all_gather over {axis} of dim {dim} of a value that is {kind}: there is nothing to gather."
            )
        shape = [n * self.sizes(axis) if i == dim else n for i, n in enumerate(x.shape)]
        return self._emit(shape, x.dtype, Kind(kind.partial, kind.cut - {(axis, dim)}), (axis,))

    def normal(self, *shape: int) -> Tensor:
        return self._emit(shape, self.dtype, WHOLE, ())

    def approximate(self, x: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        kind = self.typing.kind(x)
        plain = torch.empty_like(x)
        y = by(self.typing.note(plain, WHOLE))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise ModelError(
                f"leaf.approximate: the approximation of a tensor of shape {list(x.shape)} is "
                f"{list(y.shape) if isinstance(y, Tensor) else type(y).__name__}; it has the same shape."
            )
        return self.typing.note(torch.empty_like(y), kind)

    def _known(self, name: str, x: Any, axes: tuple[str, ...]) -> Kind:
        if not isinstance(x, Tensor):
            raise ModelError(f"leaf.{name} of {type(x).__name__}; give a tensor.")
        for axis in axes:
            self.sizes(axis)  # a name that is no axis is an error
        return self.typing.kind(x)

    def _emit(self, shape: Any, dtype: torch.dtype, kind: Kind, axes: tuple[str, ...]) -> Tensor:
        if axes:
            self.used.add(axes)
        return self.typing.note(torch.empty(tuple(shape), dtype=dtype, device=_META), kind)


def _on_meta(x: Tensor) -> Tensor:
    return x if x.device == _META else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_META)
