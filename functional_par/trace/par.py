"""The ``par`` of the trace: computes shapes and types of collectives, and refuses those that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from functional_par.comm.base import Group
from functional_par.errors import ModelError, SuperfluousCollective
from functional_par.par import Par, merge_axes
from functional_par.trace.values import Axes, Typing, Value, names, order

if TYPE_CHECKING:
    from functional_par.trace.infer import Setting


class TracePar(Par):
    """Collectives as rules on types. Along an axis that no transform uses they are the identity."""

    def __init__(self, typing: Typing, setting: Setting, batch: Mapping[str, Tensor]) -> None:
        self.typing, self.setting = typing, setting
        self.mode, self.async_comm, self.batch = setting.mode, setting.async_comm, batch
        self.merged: set[tuple[str, ...]] = set()

    def size(self, axis: str) -> int:
        return self.setting.sizes[merge_axes((axis,))[0]]

    def axis_index(self, axis: str) -> Tensor:
        self.size(axis)
        return self.typing.emit((), torch.empty((), dtype=torch.int64, device="meta"), Value(axes=self._active(axis)))

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        return self._reduce(x, "psum", "sum", axes)

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        active = self._varying(x, "pmax", axes)
        value = self.typing.value(x)
        return self.typing.emit(x.shape, x, Value(axes=value.axes - active, data=value.data))

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        active, value = self._active(*axes), self.typing.value(x)
        if already := order(active & value.axes):
            raise SuperfluousCollective(
                f"{self.typing.where()}: par.pvary over {names(already)} of a value that already differs along "
                f"{names(already)}; its cotangent would be summed once too often. Leave {names(already)} out."
            )
        return self._emit(x, x.shape, replace(value, axes=value.axes | active)) if active else x

    def all_gather(self, x: Tensor, axis: str, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
        if to not in ("varying", "replicated"):
            raise ModelError(f"{self.typing.where()}: all_gather(to={to!r}): it is 'varying' or 'replicated'.")
        active, value = self._varying(x, "all_gather", (axis,)), self.typing.value(x)
        if to == "replicated":
            value = replace(value, axes=value.axes - active, closed=value.closed | active)
        return self._emit(x, _resized(x, dim, x.shape[dim] * self.size(axis)), value)

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        active, value = self._active(axis), self.typing.value(x)
        if active & value.axes:
            raise SuperfluousCollective(
                f"{self.typing.where()}: par.slice over {axis} of a value that differs along {axis}: every rank would cut "
                "another tensor. Use par.reduce_scatter for partial sums, or par.take for a window of a rank's own value."
            )
        return self._emit(
            x, _resized(x, dim, self._chunk(x, axis, dim, "slice")), replace(value, axes=value.axes | active)
        )

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        active, value = self._active(axis), self.typing.value(x)
        if len(starts) != self.size(axis) or any(not 0 <= s <= x.shape[dim] - length for s in starts):
            raise ModelError(
                f"{self.typing.where()}: par.take(starts={starts}, length={length}) along {axis} of size "
                f"{self.size(axis)}: one start a rank, with every window inside the {x.shape[dim]} entries of dim {dim}."
            )
        sources = frozenset(self.typing.meet(value, active - value.axes)) if value.grad else frozenset()
        return self._emit(x, _resized(x, dim, length), replace(value, axes=value.axes | active, sources=sources))

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        self._varying(x, "reduce_scatter", (axis,))
        return self._emit(x, _resized(x, dim, self._chunk(x, axis, dim, "reduce_scatter")), self.typing.value(x))

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        self._varying(x, "all_to_all", (axis,))
        shape = _resized(x, split, self._chunk(x, axis, split, "all_to_all"))
        shape[concat] *= self.size(axis)
        return self._emit(x, shape, self.typing.value(x))

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        self._varying(x, "ppermute", (axis,))
        if sorted(to) != list(range(self.size(axis))):
            raise ModelError(
                f"{self.typing.where()}: par.ppermute(to={to}) along {axis}: `to` is a permutation of the "
                f"{self.size(axis)} ranks 0 to {self.size(axis) - 1}."
            )
        return self._emit(x, x.shape, self.typing.value(x))

    def kernel(self, definition: Callable[..., Any], fast: Callable[..., Any]) -> Any:
        return definition

    def group(self, axis: str) -> Group:
        raise ModelError(
            f"{self.typing.where()}: par.group({axis!r}) is for kernels: give the definition in plain operations with "
            "par.kernel(definition, fast)."
        )

    def _reduce(self, x: Tensor, name: str, what: str, axes: tuple[str, ...]) -> Tensor:
        active, value = self._varying(x, name, axes), self.typing.value(x)
        return (
            self._emit(x, x.shape, replace(value, axes=value.axes - active, closed=value.closed | active))
            if active
            else x
        )

    def _active(self, *axes: str) -> Axes:
        merged = merge_axes(axes)
        real = tuple(axis for axis in merged if self.size(axis) > 1)
        if len(real) > 1:
            self.merged.add(real)
        return frozenset(merged) & self.setting.active

    def _varying(self, x: Tensor, name: str, axes: tuple[str, ...]) -> Axes:
        """The active axes, over all of which ``x`` must vary."""
        active = self._active(*axes)
        if same := order(active - self.typing.value(x).axes):
            raise SuperfluousCollective(
                f"{self.typing.where()}: par.{name} over {names(same)} of a value that is already the same on every rank "
                f"of {names(same)}; a sum would be {' * '.join(same)} times too large. Leave {names(same)} out, or write "
                "par.pvary first if every rank is meant to contribute."
            )
        return active

    def _chunk(self, x: Tensor, axis: str, dim: int, name: str) -> int:
        size = self.size(axis)
        if x.shape[dim] % size:
            raise ModelError(
                f"{self.typing.where()}: par.{name} cuts dim {dim} of {list(x.shape)} in {axis}={size} chunks, but "
                f"{x.shape[dim]} is not a multiple of {size}. Change the size of the dim or of the axis."
            )
        return x.shape[dim] // size

    def _emit(self, x: Tensor, shape: Any, value: Value) -> Tensor:
        self.typing.keep(x)
        return self.typing.emit(shape, x, value)


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape
