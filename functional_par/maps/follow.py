"""Follows a map on meta tensors and gives every result its ``Kind``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from functional_par.errors import ModelError, SuperfluousCollective
from functional_par.maps import rules
from functional_par.maps.both import Both, Did, numbers_of
from functional_par.maps.leaf import Leaf, extent
from functional_par.maps.types import WHOLE, Kind, listed, need_no_sum
from functional_par.random import Key
from functional_par.random import key as make_key
from functional_par.spec import Spec

_META = torch.device("meta")


class Following(TorchDispatchMode):
    """Knows the kind of every tensor of one map. A tensor that the map brings along is whole.

    Attributes:
        done: the operations so far.
        both: compares them with those on the whole leaf, if there are such.
    """

    def __init__(self, both: Both | None = None) -> None:
        super().__init__()
        self.kinds: Any = WeakIdKeyDictionary()
        self.done: list[Did] = []
        self.both = both
        self._free = False

    def kind(self, x: Tensor) -> Kind:
        return self.kinds.get(x, WHOLE)

    def note(self, x: Tensor, kind: Kind) -> Tensor:
        self.kinds[x] = kind
        return x

    def did(self, name: str, numbers: tuple[str, ...], results: Sequence[Tensor]) -> None:
        """Take down one operation."""
        if self._free:
            return
        each = Did(name, numbers, tuple((tuple(x.shape), self.kind(x)) for x in results))
        if self.both:
            self.both.compare(each)
        self.done.append(each)

    @contextmanager
    def free(self) -> Iterator[None]:
        """What is done inside may depend on the size of the shard."""
        before, self._free = self._free, True
        try:
            yield
        finally:
            self._free = before

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
        name = func._schema.name.removeprefix("aten::")
        view = self.both.kind_of_view(name) if self.both and not self._free else None
        results = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        for x in results:
            self.note(x, view or rules.result(func, bound, self.kind, x))
        self.did(name, numbers_of(bound), results)
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
        return self._emit("psum", x.shape, x.dtype, Kind(kind.partial - frozenset(axes), kind.cut), axes)

    def amax(self, x: Tensor) -> Tensor:
        need_no_sum("leaf.amax", [self._known("amax", x, ())])
        return self._emit("amax", (), x.dtype, WHOLE, self.spec.sharded)

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        kind, dim = self._known("all_gather", x, (axis,)), dim % max(x.ndim, 1)
        if (axis, dim) not in kind.cut:
            raise SuperfluousCollective(
                f"leaf.all_gather over {axis} of dim {dim} of a value that is {kind}: there is nothing to gather."
            )
        whole, part = extent(self.spec, axis, self.sizes(axis))
        shape = [n * whole // part if i == dim else n for i, n in enumerate(x.shape)]
        return self._emit("all_gather", shape, x.dtype, Kind(kind.partial, kind.cut - {(axis, dim)}), (axis,))

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        kind, dim = self._known("slice", x, (axis,)), dim % max(x.ndim, 1)
        if axis not in self.spec.sharded or axis in kind.axes | kind.partial:
            raise SuperfluousCollective(
                f"leaf.slice over {axis} of a value that is {kind}, for a leaf that is {self.spec}: it takes a rank's block, "
                "along an axis that the leaf is cut along, of what is the same on every rank of that axis."
            )
        whole, part = extent(self.spec, axis, self.sizes(axis))
        if not x.ndim or x.shape[dim] % whole:
            raise ModelError(
                f"leaf.slice over {axis} of dim {dim} of a tensor of shape {list(x.shape)}: the leaf has {whole} there, and "
                "every rank gets the block that its shard has of it."
            )
        shape = [n // whole * part if i == dim else n for i, n in enumerate(x.shape)]
        return self._emit("slice", shape, x.dtype, Kind(kind.partial, kind.cut | {(axis, dim)}), ())

    def normal(self, *shape: int) -> Tensor:
        return self._emit("normal", shape, self.dtype, WHOLE, ())

    def approximate(self, x: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
        kind = self.typing.kind(x)
        with self.typing.free():
            y = by(self.typing.note(torch.empty_like(x), WHOLE))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise ModelError(
                f"leaf.approximate: the approximation of a tensor of shape {list(x.shape)} is "
                f"{list(y.shape) if isinstance(y, Tensor) else type(y).__name__}; it has the same shape."
            )
        with self.typing.free():
            return self.typing.note(torch.empty_like(y), kind)

    def _known(self, name: str, x: Any, axes: tuple[str, ...]) -> Kind:
        if not isinstance(x, Tensor):
            raise ModelError(f"leaf.{name} of {type(x).__name__}; give a tensor.")
        for axis in axes:
            self.sizes(axis)  # a name that is no axis is an error
        return self.typing.kind(x)

    def _emit(self, name: str, shape: Any, dtype: torch.dtype, kind: Kind, axes: tuple[str, ...]) -> Tensor:
        if axes:
            self.used.add(axes)
        with self.typing.free():
            x = self.typing.note(torch.empty(tuple(shape), dtype=dtype, device=_META), kind)
        self.typing.did(f"leaf.{name}", axes, [x])
        return x


def _on_meta(x: Tensor) -> Tensor:
    return x if x.device == _META else torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_META)
