"""What is known of a parameter without holding it: ``Param`` says what it is, ``Spec`` where it lies and what it owes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from functional_par import init
from functional_par.errors import ModelError
from functional_par.init import Init
from functional_par.mesh import AXES, Coords, Mesh


@dataclass(frozen=True)
class Param:
    """An abstract parameter: a shape, a name for each dim, and how its initial values are drawn.

    Args:
        shape: global shape, whatever the layout.
        dims: a word for each dim, separated by spaces. The words decide what ``shard_tp`` cuts: by default dims named
            ``vocab``, ``heads``, ``kv_heads`` and ``ffn`` lie on tp, and all others are whole on every rank.
        init: how initial values are drawn, from ``fp.init``: a function of the seed, the path and the global index.
        trainable: False keeps the leaf as it is; it has no gradient and no optimizer state.

    >>> Param((256, 64), "vocab embed").names
    ('vocab', 'embed')

    Raises:
        ModelError: if the number of names and sizes differ, or a size is not positive.
    """

    shape: tuple[int, ...]
    dims: str
    init: Init = field(default_factory=lambda: init.normal(0.02))
    trainable: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.names) != len(self.shape):
            raise ModelError(
                f"Param(shape={self.shape}, dims={self.dims!r}): {len(self.shape)} sizes but {len(self.names)} names. "
                "Name every dim once, in order, separated by spaces."
            )
        for name, size in zip(self.names, self.shape, strict=True):
            if not isinstance(size, int) or size < 1:
                raise ModelError(f"Param(dims={self.dims!r}): size {size!r} of dim {name!r} is not a positive integer.")
            if not name.isidentifier():
                raise ModelError(f"Param(dims={self.dims!r}): {name!r} is not a name; dims are words such as 'embed'.")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each dim."""
        return tuple(self.dims.split())


@dataclass(frozen=True)
class Debt:
    """One axis over which the local gradient is only a partial sum.

    Attributes:
        axis: the mesh axis to sum over; ``"pp"`` stands for the pipeline ranks that own a copy.
        reason: why, in words.
        layer, place: the layer and the line of source where the leaf met the data; empty for a tie.
        payer: name of the map on local gradients that sums over the axis; "" for the step's own reduction.
    """

    axis: str
    reason: str
    layer: str = ""
    place: str = ""
    payer: str = ""

    def __str__(self) -> str:
        where = f" in layer {self.layer!r}, {self.place}" if self.layer else ""
        return f"{self.axis}: {self.reason}{where}"


@dataclass(frozen=True)
class Spec:
    """The sharding annotation of one leaf: pure data, no tensor.

    Attributes:
        path: dotted path in the parameter tree.
        shape: global shape.
        names: the name of each dim.
        axes: for each dim the mesh axis it is cut along, or None.
        owners: pp coordinates of the ranks that hold the leaf, in order; the first is the one that counts and saves it.
        owes: the axes over which the gradient must still be summed, in mesh order.
        trainable: whether it has a gradient at all.
    """

    path: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    axes: tuple[str | None, ...]
    owners: tuple[int, ...] = (0,)
    owes: tuple[Debt, ...] = ()
    trainable: bool = True

    def __str__(self) -> str:
        """The einops-like annotation.

        >>> str(Spec("embed.weight", (256, 64), ("vocab", "embed"), ("tp", None)))
        'vocab@tp embed'
        """
        return " ".join(f"{n}@{a}" if a else n for n, a in zip(self.names, self.axes, strict=True))

    @property
    def sharded(self) -> tuple[str, ...]:
        """Mesh axes along which the leaf is cut."""
        return tuple(axis for axis in AXES if axis in self.axes)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of every rank's shard. A dim that its axis does not divide is padded at the end."""
        return tuple(
            -(-size // getattr(mesh, axis)) if axis else size for size, axis in zip(self.shape, self.axes, strict=True)
        )

    def starts(self, mesh: Mesh, coords: Coords) -> tuple[int, ...]:
        """Global index of the first element of the shard at ``coords``, for each dim."""
        local = self.local_shape(mesh)
        return tuple(getattr(coords, axis) * size if axis else 0 for size, axis in zip(local, self.axes, strict=True))

    @property
    def pending(self) -> tuple[str, ...]:
        """The axes that the step's own reduction sums over, in mesh order."""
        return tuple(debt.axis for debt in self.owes if not debt.payer)

    def payers(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The ranks whose gradients of this leaf the step sums with those of ``rank``, in rank order."""
        return payers(mesh, rank, self.pending, self.owners)

    def counted_by(self, coords: Coords, cut: Sequence[str] = ()) -> bool:
        """True on exactly one rank for each shard: the first of its replicas on its first owner. Along the axes ``cut`` ranks
        have no replicas but slices of it, each of which counts."""
        copied = (axis for axis in AXES if axis not in cut and axis != "pp" and axis not in self.axes)
        return coords.pp == self.owners[0] and all(getattr(coords, axis) == 0 for axis in copied)


def payers(mesh: Mesh, rank: int, axes: Sequence[str], owners: Sequence[int]) -> tuple[int, ...]:
    """The ranks that sum with ``rank`` over ``axes``, in rank order; over pp only those at the coordinates ``owners``."""
    group = mesh.group(*axes, rank=rank) if axes else (rank,)
    return tuple(r for r in group if "pp" not in axes or mesh.coords(r).pp in owners)
