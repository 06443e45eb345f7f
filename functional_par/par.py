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
from enum import Enum
from typing import Any, Literal, TypeVar

from torch import Tensor

from functional_par.capture import Capture
from functional_par.comm.base import Group
from functional_par.errors import CompositionError, MeshError, ModelError
from functional_par.mesh import AXES
from functional_par.random import Key

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
        capture: for kernels: what keeps the weight gradients of the running layer for later; None where every weight is
            differentiated.
    """

    mode: TensorParallelMode
    async_comm: bool
    batch: Mapping[str, Tensor]
    key: Key
    capture: Capture | None = None

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
