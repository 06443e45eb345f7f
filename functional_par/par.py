"""``par``: what a layer function knows of parallelism. Axis sizes and collectives, named by axis; never a rank number.

A value either is the same on every rank of an axis (*replicated*) or differs (*varying*). The methods are the only ways
from one to the other, and each has a transpose that carries cotangents back:

==============  ======================  ============================  ==========================
method          forward                 type along the axis           transpose
==============  ======================  ============================  ==========================
psum            sum over ranks          varying -> replicated         pvary
pvary           nothing                 replicated -> varying         psum
all_gather      concatenate             varying -> varying            reduce_scatter
all_gather      concatenate             varying -> replicated         slice
slice           own chunk               replicated -> varying         all_gather (replicated)
take            own window              any -> varying                place the window in zeros
reduce_scatter  own chunk of the sum    varying -> varying            all_gather (varying)
all_to_all      exchange chunks         varying -> varying            all_to_all back
ppermute        move between ranks      varying -> varying            ppermute back
==============  ======================  ============================  ==========================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from functional_par.comm import collectives
from functional_par.comm.base import Group
from functional_par.comm.solo import SoloGroup
from functional_par.errors import CompositionError, MeshError, ModelError
from functional_par.mesh import AXES
from functional_par.random import Key
from functional_par.random import key as make_key

F = TypeVar("F", bound=Callable[..., Any])


class TensorParallelMode(Enum):
    """How activations between tensor-parallel layers lie: whole on every rank, or split on the sequence."""

    ALL_REDUCE = "ALL_REDUCE"
    REDUCE_SCATTER = "REDUCE_SCATTER"

    @classmethod
    def parse(cls, mode: TensorParallelMode | str) -> TensorParallelMode:
        """Accept a member or its name in any case, with ``-`` or ``_``.

        >>> TensorParallelMode.parse("reduce-scatter")
        <TensorParallelMode.REDUCE_SCATTER: 'REDUCE_SCATTER'>
        """
        if isinstance(mode, cls):
            return mode
        name = str(mode).upper().replace("-", "_")
        if name not in cls.__members__:
            raise CompositionError(f"tp mode {mode!r}: it is one of {', '.join(cls.__members__)}.")
        return cls[name]


TensorParallelLinearMode = TensorParallelMode


class Par(ABC):
    """What a layer function sees of parallelism; one implementation runs, the other infers types.

    Attributes:
        mode: how activations lie between tensor-parallel layers.
        async_comm: whether layers overlap communication with computation.
        batch: this microbatch's fields, on every stage.
        key: names the random numbers of this step: a function of (seed, step), the same on every rank. The trace has
            another key than the run, so a layer must not branch on its bits.
    """

    mode: TensorParallelMode
    async_comm: bool
    batch: Mapping[str, Tensor]
    key: Key

    @property
    @abstractmethod
    def layer_key(self) -> Key:
        """``key`` folded with the name of the running layer: layers that share one function draw different numbers."""

    @property
    @abstractmethod
    def rows(self) -> Tensor:
        """Index within the global batch of each row of this microbatch, int64 [rows]. It differs along the data axes."""

    @property
    def sequence_split(self) -> bool:
        """True when activations are split on the sequence over tp (REDUCE_SCATTER)."""
        return self.mode is TensorParallelMode.REDUCE_SCATTER

    @abstractmethod
    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""

    @abstractmethod
    def axis_index(self, axis: str) -> Tensor:
        """This rank's position along an axis, as an int64 tensor without dims: a varying value, not a Python number."""

    @abstractmethod
    def psum(self, x: Tensor, *axes: str) -> Tensor:
        """Sum of ``x`` over the ranks of the axes. ``varying -> replicated``; transpose: ``pvary``.

        ::

            rank 0  [1 2]  ->  [4 6]
            rank 1  [3 4]  ->  [4 6]
        """

    @abstractmethod
    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        """Elementwise maximum over the ranks of the axes, without a gradient. ``varying -> replicated``."""

    @abstractmethod
    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        """``x`` itself, about to meet data that differ along the axes. ``replicated -> varying``; transpose: ``psum``.

        For activations, into which a cotangent flows. Fields of the batch have none and need none; a parameter's is summed
        once at the end of the step.

        ::

            rank 0  [1 2]  ->  [1 2]
            rank 1  [1 2]  ->  [1 2]
        """

    @abstractmethod
    def all_gather(self, x: Tensor, axis: str, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
        """Concatenate ``x`` of all ranks along ``dim``. ``varying -> to``; transpose: ``reduce_scatter`` when the
        result goes on to meet varying data (``to="varying"``), else ``slice``.

        ::

            rank 0  [1 2]  ->  [1 2 3 4]
            rank 1  [3 4]  ->  [1 2 3 4]
        """

    @abstractmethod
    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """This rank's equal chunk of a replicated ``x``. ``replicated -> varying``; transpose: ``all_gather``.

        ::

            rank 0  [1 2 3 4]  ->  [1 2]
            rank 1  [1 2 3 4]  ->  [3 4]
        """

    @abstractmethod
    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        """The window ``starts[i] : starts[i] + length`` along ``dim``, on rank ``i``. Windows may overlap.
        ``any -> varying``, no communication; transpose: place the window in zeros. A replicated parameter that is
        taken from owes a sum over the axis; a replicated activation takes ``pvary`` first.

        ::

            rank 0  [1 2 3]  starts=(0, 1), length=2  ->  [1 2]
            rank 1  [1 2 3]                           ->  [2 3]
        """

    @abstractmethod
    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        """This rank's equal chunk of the sum over ranks. ``varying -> varying``; transpose: ``all_gather``.

        ::

            rank 0  [1 2]  ->  [4]
            rank 1  [3 4]  ->  [6]
        """

    @abstractmethod
    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        """Chunk ``j`` along ``split`` goes to rank ``j``; what arrives is concatenated along ``concat``.
        ``varying -> varying``; transpose: ``all_to_all`` with the dims exchanged.

        ::

            rank 0  [1 2]  ->  [1 3]
            rank 1  [3 4]  ->  [2 4]
        """

    @abstractmethod
    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        """Rank ``i`` sends ``x`` to rank ``to[i]``. ``varying -> varying``; transpose: the inverse permutation.

        ::

            rank 0  [1]  to=(1, 0)  ->  [2]
            rank 1  [2]             ->  [1]
        """

    @abstractmethod
    def kernel(self, definition: F, fast: F) -> F:
        """Choose between two functions that compute the same: ``definition``, in plain operations and collectives,
        from which types are inferred, and ``fast``, which may hold a hand-written pullback."""

    @abstractmethod
    def check_stream(self, x: Tensor, what: str) -> None:
        """ModelError in the trace, naming ``what``, unless ``x`` lies over tp as the stream does: the same on every
        rank in ALL_REDUCE, different in REDUCE_SCATTER."""

    @abstractmethod
    def group(self, axis: str) -> Group:
        """The raw communication along an axis, for use inside ``fast`` kernels."""


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

    def with_batch(self, batch: Mapping[str, Tensor], first_row: int = 0) -> RunPar:
        """The same, about another microbatch."""
        return replace(self, batch=batch, first_row=first_row)

    def within(self, layer: str) -> RunPar:
        """The same, inside the layer of that name."""
        # A layer call is short enough to notice what `replace` costs.
        inside = object.__new__(RunPar)
        inside.__dict__.update(self.__dict__, layer=layer)
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
        return x if group.size == 1 else collectives.psum(x, group)

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        group = self._merged(axes)
        return x.detach() if group.size == 1 else collectives.pmax(x, group)

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        group = self._merged(axes)
        return x if group.size == 1 else collectives.pvary(x, group)

    def all_gather(self, x: Tensor, axis: str, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else collectives.all_gather(x, group, dim, to)

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else collectives.slice(x, group, dim)

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        return collectives.take(x, self.group(axis), dim, starts, length)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else collectives.reduce_scatter(x, group, dim)

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else collectives.all_to_all(x, group, split, concat)

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        group = self.group(axis)
        return x if group.size == 1 else collectives.ppermute(x, group, to)

    def kernel(self, definition: F, fast: F) -> F:
        return fast if self.fast else definition

    def check_stream(self, x: Tensor, what: str) -> None:
        pass


def step_key(seed: int, step: int) -> Key:
    """The key of one step: ``par.key`` on every rank."""
    return make_key(seed).fold(step)


def row_count(par: Par) -> int:
    """Number of rows of this microbatch; ModelError without a batch."""
    for x in par.batch.values():
        return x.shape[0]
    raise ModelError("par.rows: this par has no batch whose rows it could count; make it with RunPar(batch=...).")


def merge_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Known axes, each once, in mesh order."""
    for axis in axes:
        if axis not in AXES or axis == "pp":
            raise MeshError(
                f"collective over {axis!r}: layers communicate along {', '.join(a for a in AXES if a != 'pp')}."
            )
    if not axes:
        raise MeshError('a collective names at least one axis, as par.psum(x, "tp") does.')
    return tuple(axis for axis in AXES if axis in axes)


_SOLO = SoloGroup()
