"""The one interface below every collective: ``group.start(op, x) -> handle``, ``handle.wait() -> tensor``.

Backends implement it; nothing here differentiates, and nothing here may depend on a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from functional_par.mesh import Coords, Mesh


@dataclass(frozen=True)
class AllReduce:
    """Every rank gets the elementwise sum (or maximum) over the group, in a fresh tensor unless ``donate``.

    All ranks get the same bits.
    """

    op: Literal["sum", "max"] = "sum"


@dataclass(frozen=True)
class AllGather:
    """Every rank gets the concatenation along ``dim`` of all inputs, in group order. Inputs have equal shapes."""

    dim: int


@dataclass(frozen=True)
class ReduceScatter:
    """Rank ``i`` gets the ``i``-th of ``size`` equal chunks along ``dim`` of the sum over the group."""

    dim: int


@dataclass(frozen=True)
class AllToAll:
    """Cut the input in ``size`` equal chunks along ``split``; send chunk ``j`` to rank ``j``; concatenate what
    arrives along ``concat``, in group order."""

    split: int
    concat: int


@dataclass(frozen=True)
class Permute:
    """Rank ``i`` sends its input to rank ``to[i]``; ``to`` is a permutation of the group's indices."""

    to: tuple[int, ...]


Op = AllReduce | AllGather | ReduceScatter | AllToAll | Permute


class Handle(Protocol):
    """A started operation. ``wait`` may be called again and returns the same tensor."""

    def wait(self) -> Tensor: ...


class Group(ABC):
    """One rank's view of a set of ranks that communicate.

    Attributes:
        label: what the group runs along, for people and for the record: ``"tp"``, ``"ep+dp"``, ``"tie embed.weight"``.
        ranks: world ranks in increasing order.
        index: this rank's position in ``ranks``.
    """

    label: str
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @abstractmethod
    def start(self, op: Op, x: Tensor, *, donate: bool = False) -> Handle:
        """Start ``op`` on ``x``. Every rank of the group starts the same ops, on equal shapes, in the same order.

        ``x`` is a value: nobody modifies it after ``start``, here or on the caller's side. With ``donate`` its memory
        belongs to the operation, which may overwrite it and return it; the caller does not touch it again until the
        whole world has synchronised.
        """


AGREEMENT = "agreement"
"""The phase in which ranks compare what they have to have in common."""


@dataclass
class Record:
    """What one rank communicated: calls, payload bytes and bytes on the wire by (phase, label, kind).

    Payload is the size of the local input; what this rank sent for it is reckoned by ``comm.traffic``. ``kind`` is the op's
    class name in snake case (``all_reduce``), or ``send`` and ``recv``. ``doing`` says for people what the rank is at, by its
    ``str``.
    """

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    nbytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    phase: str = ""
    doing: object = ""
    _last: tuple[str, str, torch.dtype, torch.Size] | None = None

    @property
    def last(self) -> str:
        """The last call, for people, and what the rank was doing."""
        if self._last is None:
            return "nothing yet"
        label, kind, dtype, shape = self._last
        doing = f", during {self.doing}" if self.doing else ""
        return f"{kind} over {label} of {str(dtype).removeprefix('torch.')}{list(shape)}{doing}"

    @property
    def worked(self) -> bool:
        """Whether anything was communicated besides what ranks agree on before they start."""
        return any(phase != AGREEMENT for phase, _, _ in self.calls)

    def add(self, label: str, kind: str, x: Tensor, sent: int) -> None:
        """Count one call that carries ``x``, for which this rank sends so many bytes."""
        key = (self.phase, label, kind)
        self.calls[key] += 1
        self.nbytes[key] += x.nbytes
        self.sent[key] += sent
        self._last = label, kind, x.dtype, x.shape

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of the step for the calls made inside."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def clear(self) -> None:
        """Forget what was counted."""
        self.calls.clear()
        self.nbytes.clear()
        self.sent.clear()


class World(ABC):
    """The mesh, this rank's place in it, and its communication: what a rank's ``main`` receives.

    Attributes:
        mesh: the layout of all ranks.
        rank: this rank, ``0 <= rank < mesh.size``.
        device: where this rank's tensors live.
        backend: ``"threads"``, ``"gloo"`` or ``"nccl"``.
        record: what this rank communicated so far.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    backend: str
    record: Record

    @property
    def coords(self) -> Coords:
        """This rank's coordinates in the mesh."""
        return self.mesh.coords(self.rank)

    def group(self, *axes: str) -> Group:
        """This rank's group along the merged axes. Groups of each axis, of the data axes and of the world exist from
        the start; others are made by ``prepare``."""
        return self.subgroup(self.mesh.group(*axes, rank=self.rank), "+".join(axes))

    @abstractmethod
    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create groups for these sets of ranks. Every rank of the world calls it with the same sets in the same
        order, also for sets it is not in. A set that exists already is shared. Sets of one rank are allowed."""

    def connect(self, lanes: Iterable[tuple[int, int]]) -> None:  # noqa: B027  (nothing is a fine implementation)
        """Make ready for messages between pairs (source, target) of ranks. Every rank of the world calls it with the same
        pairs in the same order. Most backends have nothing to do."""

    @abstractmethod
    def subgroup(self, ranks: tuple[int, ...], label: str) -> Group:
        """This rank's view of a set of ranks that contains it; raises CommError if it was never prepared."""

    @abstractmethod
    def send(self, x: Tensor, to: int, *, label: str = "pp") -> Handle:
        """Start sending ``x`` to rank ``to``; returns without waiting for the receiver. Messages from one rank to
        another arrive in the order of the sends."""

    @abstractmethod
    def recv(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        source: int,
        *,
        label: str = "pp",
        out: Tensor | None = None,
        what: object = "",
    ) -> Handle:
        """Start receiving the next tensor from rank ``source``; ``wait`` returns it. A message of another shape or
        dtype is a MismatchError that names both.

        Args:
            shape, dtype: of the message.
            source: the sender.
            label: for the record.
            out: contiguous memory of that shape and dtype to receive into; nobody else touches it before ``wait``.
            what: says by its ``str`` what is received, for a report of a wait that does not end.
        """
