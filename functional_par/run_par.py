"""``RunPar``: the ``par`` that runs collectives, over the groups of a real world or of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from functional_par.capture import Capture
from functional_par.comm import collectives
from functional_par.comm.base import Group
from functional_par.comm.solo import SoloGroup
from functional_par.errors import MeshError
from functional_par.par import Par, TensorParallelMode, merge_axes, row_count
from functional_par.random import Key
from functional_par.random import key as make_key

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class RunPar(Par):
    """Runs collectives over real groups. Axes without a group have size one, where every collective is the identity
    and issues no call.

    Attributes:
        groups: axes (merged in mesh order) to this rank's group.
        fast: False runs every kernel by its definition.
        key: of step ``t`` from seed ``s`` it is ``step_key(s, t)``; by default the first step's of seed 0.
        layer: name of the running layer.
        first_row: index within the global batch of the first row of ``batch``.
        capture: what the running layer's kernels capture.
        calls: the functions that run the collectives, ``comm.collectives`` or what stands in for it.
    """

    groups: Mapping[tuple[str, ...], Group] = field(default_factory=dict)
    mode: TensorParallelMode = TensorParallelMode.ALL_REDUCE
    async_comm: bool = False
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fast: bool = True
    key: Key = field(default=make_key(0).fold(0), kw_only=True)
    layer: str = field(default="", kw_only=True)
    first_row: int = field(default=0, kw_only=True)
    capture: Capture | None = field(default=None, kw_only=True)
    calls: Any = field(default=collectives, kw_only=True, repr=False)

    def with_batch(self, batch: Mapping[str, Tensor], first_row: int = 0) -> RunPar:
        """The same, about another microbatch."""
        return replace(self, batch=batch, first_row=first_row)

    def within(self, layer: str, capture: Capture | None = None) -> RunPar:
        """The same, inside the layer of that name, for one call of it."""
        # A layer call is short enough to notice what `replace` costs.
        inside = object.__new__(RunPar)
        inside.__dict__.update(self.__dict__, layer=layer, capture=capture)
        return inside

    @property
    def layer_key(self) -> Key:
        return self.key.fold(self.layer)

    @property
    def rows(self) -> Tensor:
        return torch.arange(self.first_row, self.first_row + row_count(self), device=self.device)

    def size(self, axis: str) -> int:
        return self.group(axis).size

    def group(self, axis: str) -> Group:
        return self._merged((axis,))

    def _merged(self, axes: tuple[str, ...]) -> Group:
        merged = merge_axes(axes)
        group = self.groups.get(merged)
        if group is None:
            # Axes of size one add nothing to a merged group.
            real = tuple(axis for axis in merged if (axis,) in self.groups)
            group = self.groups.get(real)
            if group is None and real:
                raise MeshError(f"no group along {'+'.join(real)} was prepared for this program.")
        return group or _SOLO

    def axis_index(self, axis: str) -> Tensor:
        return torch.tensor(self.group(axis).index, device=self.device)

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        group = self._merged(axes)
        return x if group.size == 1 else self.calls.psum(x, group)

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        group = self._merged(axes)
        return x.detach() if group.size == 1 else self.calls.pmax(x, group)

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        group = self._merged(axes)
        return x if group.size == 1 else self.calls.pvary(x, group)

    def all_gather(self, x: Tensor, axis: str, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else self.calls.all_gather(x, group, dim, to)

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else self.calls.slice(x, group, dim)

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        return self.calls.take(x, self.group(axis), dim, starts, length)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else self.calls.reduce_scatter(x, group, dim)

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else self.calls.all_to_all(x, group, split, concat)

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else self.calls.ppermute(x, group, to)

    def kernel(self, definition: F, fast: F) -> F:
        return fast if self.fast else definition

    def check_stream(self, x: Tensor, what: str) -> None:
        pass


def step_key(seed: int, step: int) -> Key:
    """The key of one step: ``par.key`` on every rank."""
    return make_key(seed).fold(step)


_SOLO = SoloGroup()
