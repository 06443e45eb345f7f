"""The parameters of a layer while it runs: always there, or gathered from slices before it runs and freed after.

A gathered leaf is the same tensor at every use. Its memory goes and comes, so that a backward which has saved it reads its
values again, and keeps no memory alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from functional_par.capture import Pair
from functional_par.comm.base import AllGather, Group, Handle, Op, World
from functional_par.plan import Plan
from functional_par.zero.parts import parts


class Weights(Protocol):
    """What an executor asks for its parameters."""

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """By path."""

    def enter(self, layer: str) -> None:
        """From here on the leaves of this layer have their values."""

    def leave(self, layer: str, tensors: list[Tensor], later: list[Pair] | None = None) -> list[Tensor]:
        """The layer has run, forward or backward, and made ``tensors``, which are returned in memory that stays. ``later`` is
        what waits for weight gradients; it is changed in place likewise."""


class Resident:
    """Parameters that are whole on this rank all the time."""

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        self.leaves: Mapping[str, Tensor] = leaves

    def enter(self, layer: str) -> None:
        """They are there."""

    def leave(self, layer: str, tensors: list[Tensor], later: list[Pair] | None = None) -> list[Tensor]:
        """They stay."""
        return tensors


class Gathered:
    """Parameters that lie in slices on the ranks along the data axes. While a layer runs the next one's are on their way. With
    ``poison`` memory is NaN instead of freed, so that what is read then shows in the results and does not end the process.

    Attributes:
        leaves: path to tensor; its values are there between ``enter`` and ``leave`` of a layer that reads it.
        fills, peak: how often a bucket was filled, and how many layers had memory at most at a time.
    """

    def __init__(self, plan: Plan, world: World, dtype: torch.dtype, poison: bool = False) -> None:
        self.world, self.poison, self.fills, self.peak = world, poison, 0, 0
        self.parts = parts(plan, world.rank)
        self._flats: list[Tensor] = []
        self._views: dict[str, Tensor] = {}
        for part in self.parts:
            flat = torch.empty(part.bucket.elements, dtype=dtype, device=world.device)
            self._views |= part.shards(flat)
            flat.untyped_storage().resize_(0)
            self._flats.append(flat)
        self._memory = {flat.untyped_storage()._cdata for flat in self._flats}
        at = {path: i for i, part in enumerate(self.parts) for path in part.bucket.paths}
        layers = plan.layers_on(world.coords.pp)
        self._units = {layer.name: sorted({at[path] for path in layer.paths if path in at}) for layer in layers}
        self.leaves: Mapping[str, Tensor] = {}
        self.begin({}, ())

    def begin(self, params: Mapping[str, Tensor], order: Iterable[str]) -> None:
        """Before a run in which the layers are entered in this order.

        Args:
            params: slices [elements], and whole shards of the leaves that are not cut.
            order: names of layers.
        """
        self._own = [part.joined({p: params[p] for p in part.bucket.paths}) for part in self.parts] if params else []
        self.leaves = {**params, **self._views}
        self._order, self._at = [layer for layer in order if self._units[layer]], 0
        self._started: dict[int, Handle] = {}
        self._filled: set[int] = set()
        for flat in self._flats:
            flat.untyped_storage().resize_(0)

    def enter(self, layer: str) -> None:
        """Wait for the leaves of this layer, and start to gather those of the next."""
        if not self._units[layer]:
            return
        assert self._order[self._at] == layer, "layers are entered in the order that was told"
        after = self._order[self._at + 1] if self._at + 1 < len(self._order) else None
        with self.world.record.during("parameters"):
            for i in self._units[layer]:
                self._fill(i)
            for i in self._units[after] if after is not None else ():
                self._start(i)
        self.peak = max(self.peak, self._live())

    def leave(self, layer: str, tensors: list[Tensor], later: list[Pair] | None = None) -> list[Tensor]:
        """Free the leaves of this layer, unless the next is the same one or reads them too."""
        tensors = [self.owned(x) for x in tensors]
        if later:
            later[:] = [self._settled(pair) for pair in later]
        if self._units[layer]:
            self._at += 1
            kept = self._units[self._order[self._at]] if self._at < len(self._order) else ()
            for i in self._filled.difference(kept):
                self._free(i)
            self._filled.intersection_update(kept)
        return tensors

    def owned(self, x: Tensor) -> Tensor:
        """``x``, or a copy if it lies in memory that is freed."""
        return x.clone() if x.untyped_storage()._cdata in self._memory else x

    def _start(self, i: int) -> None:
        if i not in self._filled and i not in self._started:
            bucket = self.parts[i].bucket
            group = self.world.subgroup(bucket.ranks, bucket.label)
            self._started[i] = group.start(AllGather(0), self._own[i])

    def _fill(self, i: int) -> None:
        if i in self._filled:
            return
        self._start(i)
        whole = self._started.pop(i).wait()
        flat = self._flats[i]
        flat.untyped_storage().resize_(whole.nbytes)
        flat.data.copy_(whole)  # `data` has a version of its own: to what a backward has saved this is no change
        self._filled.add(i)
        self.fills += 1

    def _free(self, i: int) -> None:
        flat = self._flats[i]
        if self.poison:
            flat.data.fill_(torch.nan)
        else:
            flat.untyped_storage().resize_(0)

    def _live(self) -> int:
        return sum(1 for units in self._units.values() if units and {*units} <= self._filled | {*self._started})

    def _settled(self, pair: Any) -> Any:
        """The same gradient to come, made of nothing that is freed."""
        parts = {f.name: x for f in fields(pair) if isinstance(x := getattr(pair, f.name), Tensor)}
        copies = {name: y for name, x in parts.items() if (y := self.owned(x)) is not x}
        return replace(pair, **copies) if copies else pair


class Lent(Group):
    """A group for layers whose weights may be freed while another thread still reads what it was sent: such weights are copied
    first."""

    def __init__(self, group: Group, gathered: Gathered) -> None:
        self.label, self.ranks, self.index = group.label, group.ranks, group.index
        self._group, self._gathered = group, gathered

    def start(self, op: Op, x: Tensor, *, donate: bool = False) -> Handle:
        return self._group.start(op, self._gathered.owned(x.detach()), donate=donate)
