"""A layout: all choices by which one model becomes many programs that have to be the same function."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from functional_par.errors import CompositionError, ModelError, TraceError
from functional_par.mesh import Mesh
from functional_par.model import Model
from functional_par.par import TensorParallelMode
from functional_par.pipeline.schedules import chunks_of
from functional_par.plan import Plan
from functional_par.program import Program, compose
from functional_par.transforms import (
    DPReduce,
    Precision,
    ShardTP,
    StagePP,
    Transform,
    dp_reduce,
    shard_tp,
    stage_pp,
    tie,
)


@dataclass(frozen=True, repr=False)
class Layout:
    """How a model lies on ranks and how its step runs.

    Attributes:
        mesh: sizes of the axes.
        mode, async_comm: of ``shard_tp``.
        schedule, microbatches, split, chunks: of ``stage_pp``.
        ties: names of leaves that are made one, by ``tie``. Unlike all else they change the function.
        engine: of ``program.step``.
        zero: of ``dp_reduce``.

    >>> layout = Layout(Mesh(dp=2, pp=2), microbatches=3, ties=(("head.weight", "embed.weight"),))
    >>> layout
    Layout(Mesh(pp=2, dp=2), microbatches=3, ties=(('head.weight', 'embed.weight'),))
    >>> len(layout.transforms())
    4
    >>> layout.pieces
    6
    """

    mesh: Mesh = Mesh()  # noqa: RUF009  (frozen)
    mode: str = "ALL_REDUCE"
    async_comm: bool = False
    schedule: str = "1f1b"
    microbatches: int = 1
    split: tuple[int, ...] | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    engine: str = "func"
    chunks: int | None = None
    zero: int = 0

    def __repr__(self) -> str:
        shown = (f.name for f in fields(self) if f.name != "mesh" and getattr(self, f.name) != f.default)
        return f"Layout({', '.join([str(self.mesh), *(f'{name}={getattr(self, name)!r}' for name in shown)])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis shows it."""
        printer.text(repr(self))

    @property
    def pieces(self) -> int:
        """Of how many rows a global batch is a multiple: replicas times microbatches."""
        return self.mesh.ep * self.mesh.dp * self.microbatches

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.mesh.pp * chunks_of(self.schedule, self.chunks)

    def transforms(self, *others: Transform) -> tuple[Transform, ...]:
        """The transforms of this layout, and ``others``. A ``shard_tp`` among the others says which dims are cut; of a
        ``stage_pp`` or a ``dp_reduce`` the layout has its own. A ``precision`` is left out: proofs are in float64."""
        given = next((other for other in others if isinstance(other, ShardTP)), shard_tp())
        shard = replace(given, mode=TensorParallelMode.parse(self.mode), async_comm=self.async_comm)
        kept = [other for other in others if not isinstance(other, (ShardTP, StagePP, DPReduce, Precision))]
        ties = [tie(*names) for names in self.ties]
        pipeline = stage_pp(self.schedule, self.microbatches, self.split, self.chunks)
        return (*ties, *kept, shard, pipeline, dp_reduce(zero=self.zero))

    def program(self, model: Model, *others: Transform) -> Program:
        """The model in this layout; raises what ``compose`` raises."""
        return compose(*self.transforms(*others))(model)


def refusal(model: Model, layout: Layout, *others: Transform) -> str:
    """Why a model has no program in a layout for a matter of sizes, or because leaves that it ties are used too differently;
    "" if it has one. Stages are left out.

    Raises:
        TraceError: if a collective is wrong, which is no matter of sizes.
    """
    for other in others:
        model = other.on_model(model)
    try:
        plan = Plan.start(model, replace(layout.mesh, pp=1), {})
        for transform in layout.transforms(*others):
            if not isinstance(transform, StagePP):
                plan = transform(plan)
        plan.trace()
    except (CompositionError, ModelError) as error:
        return str(error)
    except TraceError as error:
        if not layout.ties:
            raise
        return str(error)
    return ""


MODES = tuple(mode.value for mode in TensorParallelMode)
"""The modes of tensor parallelism, by name."""


def alike(model: Model) -> list[tuple[str, ...]]:
    """Leaves that a tie could join: those of one shape, with the same dims, trainable or not. At least two each."""
    kinds: dict[object, list[str]] = {}
    for path, leaf in model.leaves.items():
        kinds.setdefault((leaf.shape, leaf.names, leaf.trainable), []).append(path)
    return [tuple(paths) for paths in kinds.values() if len(paths) > 1]


def shares_leaves(model: Model) -> bool:
    """Whether two layers read the same leaf, so that the order of sums depends on the stages."""
    reads = [path for layer in model.all_layers for path in layer.paths]
    return len(reads) > len(set(reads))
