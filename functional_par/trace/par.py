"""The ``par`` of the trace: computes shapes and types of collectives, and refuses those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from functional_par.comm.base import Group
from functional_par.errors import ModelError
from functional_par.par import Par, merge_axes, row_count
from functional_par.random import Key
from functional_par.random import key as make_key
from functional_par.trace import rules
from functional_par.trace.apply import apply
from functional_par.trace.follow import Typing
from functional_par.trace.setting import Setting
from functional_par.trace.values import Axes, Value, order


class TracePar(Par):
    """Collectives as rules on types. Along an axis that no transform uses they are the identity."""

    def __init__(self, typing: Typing, setting: Setting, batch: Mapping[str, Tensor]) -> None:
        self.typing, self.setting = typing, setting
        self.mode, self.async_comm, self.batch = setting.mode, setting.async_comm, batch
        self.key = make_key(0)
        self.merged: set[tuple[str, ...]] = set()

    @property
    def layer_key(self) -> Key:
        # The layer's name stays out of the trace, which serves all layers of one function.
        return self.key

    @property
    def rows(self) -> Tensor:
        value = Value(axes=self.setting.data, data=True)
        return self.typing.emit((row_count(self),), torch.empty((), dtype=torch.int64, device="meta"), value)

    def size(self, axis: str) -> int:
        return self.setting.sizes[merge_axes((axis,))[0]]

    def axis_index(self, axis: str) -> Tensor:
        self.size(axis)
        return self.typing.emit((), torch.empty((), dtype=torch.int64, device="meta"), Value(axes=self._active(axis)))

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        return self._apply(rules.Sum, x, "psum", axes)

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        return self._apply(rules.Max, x.detach(), "pmax", axes)

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        hint = _SPLIT_STREAM if self.sequence_split and "tp" in axes else ""
        return self._apply(rules.Vary, x, "pvary", axes, hint=hint)

    def all_gather(self, x: Tensor, axis: str, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
        if to not in ("varying", "replicated"):
            raise ModelError(f"{self.typing.where()}: all_gather(to={to!r}): it is 'varying' or 'replicated'.")
        dim = self._dim(x, dim, "all_gather")
        return self._apply(rules.Gather, x, "all_gather", (axis,), dim=dim, replicated=to == "replicated")

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._apply(rules.Slice, x, "slice", (axis,), dim=self._chunks(x, axis, dim, "slice"))

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        dim = self._dim(x, dim, "take")
        full = x.shape[dim]
        if len(starts) != self.size(axis) or length < 0 or any(not 0 <= s <= full - length for s in starts):
            raise ModelError(
                f"{self.typing.where()}: par.take(starts={starts}, length={length}) along {axis} of size "
                f"{self.size(axis)}: one start a rank, with every window inside the {full} entries of dim {dim}."
            )
        return self._apply(rules.Take, x, "take", (axis,), always=True, dim=dim, length=length, full=full)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        dim = self._chunks(x, axis, dim, "reduce_scatter")
        return self._apply(rules.Scatter, x, "reduce_scatter", (axis,), dim=dim)

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        split, concat = self._chunks(x, axis, split, "all_to_all"), self._dim(x, concat, "all_to_all")
        return self._apply(rules.Exchange, x, "all_to_all", (axis,), split=split, concat=concat)

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        if sorted(to) != list(range(self.size(axis))):
            raise ModelError(
                f"{self.typing.where()}: par.ppermute(to={to}) along {axis}: `to` is a permutation of the "
                f"{self.size(axis)} ranks 0 to {self.size(axis) - 1}."
            )
        return self._apply(rules.Permute, x, "ppermute", (axis,), to=tuple(to))

    def kernel(self, definition: Callable[..., Any], fast: Callable[..., Any]) -> Any:
        return definition

    def check_stream(self, x: Tensor, what: str) -> None:
        value = self.typing.value(x)
        differs = "tp" in value.axes - value.alike
        if "tp" in self.setting.active and differs != self.sequence_split:
            raise ModelError(
                f"{self.typing.where()}: {what} of a value that {'differs' if differs else 'is the same'} along tp. It takes "
                f"the stream, which in {self.mode.value} {'differs' if self.sequence_split else 'is the same'} along tp: "
                "what a column_linear gives goes through row_linear first."
            )

    def group(self, axis: str) -> Group:
        raise ModelError(
            f"{self.typing.where()}: par.group({axis!r}) is for kernels: give the definition in plain operations with "
            "par.kernel(definition, fast)."
        )

    def _apply(
        self, kind: type[rules.Rule], x: Tensor, name: str, axes: tuple[str, ...], always: bool = False, **more: Any
    ) -> Tensor:
        """Apply a rule; along inactive axes there is nothing to do."""
        if not isinstance(x, Tensor):
            raise ModelError(f"{self.typing.where()}: par.{name} of {type(x).__name__}; give a tensor.")
        active = self._active(*axes)
        if not active and not always:
            return x
        real = tuple(axis for axis in order(active) if self.size(axis) > 1)
        size = prod(self.size(axis) for axis in real)
        return apply(x, kind(self.typing, active, real, size, f"par.{name}", self.typing.where(), **more))

    def _active(self, *axes: str) -> Axes:
        merged = merge_axes(axes)
        real = tuple(axis for axis in merged if self.size(axis) > 1)
        if len(real) > 1:
            self.merged.add(real)
        return frozenset(merged) & self.setting.active

    def _dim(self, x: Tensor, dim: int, name: str) -> int:
        if not -x.ndim <= dim < x.ndim:
            raise ModelError(f"{self.typing.where()}: par.{name} along dim {dim} of a tensor of shape {list(x.shape)}.")
        return dim % x.ndim

    def _chunks(self, x: Tensor, axis: str, dim: int, name: str) -> int:
        dim, size = self._dim(x, dim, name), self.size(axis)
        if x.shape[dim] % size:
            raise ModelError(
                f"{self.typing.where()}: par.{name} cuts dim {dim} of {list(x.shape)} in {axis}={size} chunks, but "
                f"{x.shape[dim]} is not a multiple of {size}. Change the size of the dim or of the axis."
            )
        return dim


_SPLIT_STREAM = (
    "; or, if it is the stream, which in REDUCE_SCATTER is split on the sequence, enter and leave with fp.nn.column_linear and "
    'fp.nn.row_linear, or by par.all_gather(x, "tp", 1) and par.reduce_scatter(y, "tp", 1) where par.sequence_split is true'
)
