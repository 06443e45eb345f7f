"""Hypothesis strategies for all that a program is made of: meshes, specs, layouts, models, batches. What they draw is
admitted, so a refusal or a difference is a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from functional_par import models as language
from functional_par.errors import ScheduleError
from functional_par.mesh import AXES, Mesh
from functional_par.model import Model
from functional_par.pipeline.schedules import chunks_of, schedule_names
from functional_par.program import Program
from functional_par.spec import Debt, Spec
from functional_par.testing.batch import Sample, ignores_labels
from functional_par.testing.free import LAYERS, free_model
from functional_par.testing.layout import MODES, Layout, alike, refusal
from functional_par.transforms import OwnMap, Transform

USED = ("pp", "dp", "tp", "ep")
"""Axes that some transform uses; of several meshes of one size hypothesis tries those of the first axes first."""


def meshes(max_ranks: int = 8, axes: Sequence[str] = USED) -> SearchStrategy[Mesh]:
    """Meshes of at most ``max_ranks`` ranks, of which the given axes may be larger than one."""
    return st.sampled_from(_meshes(max_ranks, tuple(axes)))


def _meshes(max_ranks: int, axes: tuple[str, ...]) -> list[Mesh]:
    sizes = product(*(range(1, max_ranks + 1) for _ in axes))
    found = (Mesh(**dict(zip(axes, size, strict=True))) for size in sizes)
    return sorted((mesh for mesh in found if mesh.size <= max_ranks), key=lambda mesh: mesh.size)


def modes() -> SearchStrategy[str]:
    """Names of the modes of tensor parallelism."""
    return st.sampled_from(MODES)


def schedules(ranks: int = 1, layers: int | None = None) -> SearchStrategy[tuple[str, int | None]]:
    """Names of pipeline schedules and how many stages each rank has under them (None for those that have their own), such
    that ``layers`` are enough for all stages."""
    found = [(name, chunks) for name in schedule_names() for chunks in _choices(name)]
    return st.sampled_from([(n, c) for n, c in found if layers is None or ranks * chunks_of(n, c) <= layers])


def _choices(name: str) -> tuple[int | None, ...]:
    """Numbers of chunks that a schedule may be given."""
    try:
        chunks_of(name, 3)
    except ScheduleError:
        return (None,)
    return (1, 2, 3)


def splits(layers: int, stages: int) -> SearchStrategy[tuple[int, ...] | None]:
    """How many of the layers each stage gets, at least one; None leaves it to ``stage_pp``."""
    cuts = st.lists(st.integers(1, max(1, layers - 1)), min_size=stages - 1, max_size=stages - 1, unique=True)
    return st.none() | cuts.map(lambda at: tuple(b - a for a, b in pairwise([0, *sorted(at), layers])))


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, max_dims: int = 3) -> Spec:
    """Specs of one leaf on a mesh: up to ``max_dims`` dims of 1 to 7, each cut along an axis of the mesh or not (also
    unevenly, also with nothing left for some ranks), on any stages, owing any other axes."""
    names = ("embed", "ffn", "heads", "head", "vocab")[:max_dims]
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=len(names))))
    axes: list[str | None] = []
    for _ in shape:
        left = [axis for axis in ("tp", "dp", "ep", "cp") if axis not in axes]
        axes.append(draw(st.none() | st.sampled_from(left)))
    stages = tuple(sorted(draw(st.sets(st.integers(0, mesh.pp - 1), min_size=1))))
    open_axes = [axis for axis in AXES if axis not in axes and (axis != "pp" or len(stages) > 1)]
    owed = draw(st.sets(st.sampled_from(open_axes))) if open_axes else set()
    owes = tuple(Debt(axis, "drawn") for axis in AXES if axis in owed)
    return Spec("leaf", shape, names[: len(shape)], tuple(axes), stages, owes, draw(st.booleans()))


def layouts(
    model: Model,
    *others: Transform,
    max_ranks: int = 4,
    axes: Sequence[str] = USED,
    modes: Sequence[str] = MODES,
    max_microbatches: int = 3,
    ties: bool = False,
    stages: int = 1,
    zeros: Sequence[int] = (0, 1, 2, 3),
) -> SearchStrategy[Layout]:
    """Layouts in which the model has a program.

    Args:
        model: any.
        others: transforms that the program has besides those of the layout.
        max_ranks, axes: see ``meshes``.
        modes: of tensor parallelism, to draw from.
        max_microbatches: largest number of microbatches of a replica.
        ties: also draw ties of leaves that are alike. They change the function.
        stages: smallest number of pipeline stages.
        zeros: of ``dp_reduce``, to draw from; 0 with maps of the user's own on gradients or updates.

    Raises:
        TraceError: while drawing, if a layer lacks a collective.
    """
    among = [mesh for mesh in _meshes(max_ranks, tuple(axes)) if stages <= mesh.pp <= len(model.layers)]
    refused: dict[Layout, str] = {}

    def admits(layout: Layout) -> bool:
        alone = Layout(Mesh(tp=layout.mesh.tp), layout.mode, ties=layout.ties)
        if alone not in refused:
            trivial = layout.mesh.tp == 1 and not layout.ties
            refused[alone] = "" if trivial else refusal(model, alone, *others)
        return not refused[alone]

    zeros = (0,) if any(isinstance(other, OwnMap) for other in others) else tuple(zeros)
    return _layouts(model, among, tuple(modes), zeros, max_microbatches, alike(model) if ties else [], admits)


@st.composite
def _layouts(
    draw: st.DrawFn,
    model: Model,
    among: list[Mesh],
    modes: tuple[str, ...],
    zeros: tuple[int, ...],
    max_microbatches: int,
    ties: list[tuple[str, ...]],
    admits: Callable[[Layout], bool],
) -> Layout:
    mesh = draw(st.sampled_from(among))
    schedule, chunks = draw(schedules(mesh.pp, len(model.layers)))
    stages = mesh.pp * chunks_of(schedule, chunks)
    layout = Layout(
        mesh,
        draw(st.sampled_from(modes)),
        async_comm=draw(st.booleans()),
        schedule=schedule,
        chunks=chunks,
        microbatches=draw(st.integers(1, max_microbatches)),
        split=draw(splits(len(model.layers), stages)) if mesh.pp > 1 else None,
        engine=draw(st.sampled_from(["func", "tape"])),
        zero=draw(st.sampled_from(zeros)) if mesh.ep * mesh.dp > 1 else 0,
    )
    # The largest tp of at most the drawn one that the sizes admit; of one rank, any mode.
    smaller = (replace(layout, mesh=replace(mesh, tp=tp)) for tp in range(mesh.tp, 1, -1))
    tried = (replace(each, mode=mode) for each in smaller for mode in (each.mode, *modes))
    layout = next(filter(admits, tried), replace(layout, mesh=replace(mesh, tp=1)))
    return draw(_tied(layout, ties, admits)) if ties else layout


@st.composite
def _tied(draw: st.DrawFn, layout: Layout, among: list[tuple[str, ...]], admits: Callable[[Layout], bool]) -> Layout:
    """The layout, or with a tie of two or more leaves of one of these groups, the owners in any order."""
    if not draw(st.booleans()):
        return layout
    group = draw(st.sampled_from(among))
    names = draw(st.permutations(group))
    tied = replace(layout, ties=(tuple(names[: draw(st.integers(2, len(names)))]),))
    return tied if admits(tied) else layout


def programs(model: Model, *others: Transform, **options: Any) -> SearchStrategy[tuple[Program, Mesh]]:
    """A program of the model, and a mesh that it has a plan for; the arguments are those of ``layouts``."""
    return layouts(model, *others, **options).map(lambda layout: (layout.program(model, *others), layout.mesh))


@st.composite
def samples(draw: st.DrawFn, model: Model, rows: int, pieces: int = 1, unit: int = 1) -> Sample:
    """What a batch is made from; see ``batches``."""
    kinds = st.sampled_from([2, 1, 0])
    kept: tuple[int, ...] = ()
    if ignores_labels(model):
        by_row = st.lists(kinds, max_size=rows).map(tuple)
        by_piece = st.lists(kinds, min_size=pieces, max_size=pieces).map(
            lambda each: tuple(kind for kind in each for _ in range(rows // pieces))
        )
        kept = draw(by_row | by_piece)
    is_open = any(None in given.shape[1:] for given in (model.batch or {}).values())
    return Sample(rows, draw(st.integers(0, 999)), unit * draw(st.integers(1, 3)) if is_open else 2, kept)


def batches(model: Model, rows: int, pieces: int = 1, unit: int = 1) -> SearchStrategy[dict[str, Tensor]]:
    """Batches of random values that the model takes.

    If labels of -100 have no loss in the model, some rows may have all, some, or none of their labels; also all rows of a
    piece, or the whole batch.

    Args:
        model: any; what it takes is ``model.batch``.
        rows: number of rows.
        pieces: of how many equal pieces (microbatches of all replicas) some may have no label left.
        unit: sizes that the model leaves open are one, two or three times this.
    """
    return samples(model, rows, pieces, unit).map(lambda sample: sample.batch(model))


def models() -> SearchStrategy[Model]:
    """Small models of a few hundred weights: ``free_models``, ``gpts`` and ``llamas``."""
    return st.one_of(free_models(), free_models(), gpts(), llamas())


@st.composite
def free_models(draw: st.DrawFn, max_layers: int = 3) -> Model:
    """See ``free_model``: any layers, tied or not, tokens or numbers, frozen leaves, a loss with a parameter."""
    kinds = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=max_layers))
    if draw(st.booleans()) and len(kinds) > 1:
        kinds[-1] = "again"
    numbers = draw(st.booleans())
    tied = not numbers and draw(st.booleans())
    places = ["", "", "embed", "head", *(f"{kind}{i}" for i, kind in enumerate(kinds) if kind != "again")]
    return draw(
        st.builds(
            free_model,
            st.just(kinds),
            vocab=st.integers(1, 7),
            width=st.integers(1, 5),
            seq=st.sampled_from([2, 1, 3, 4, None]),
            numbers=st.just(numbers),
            tied=st.just(tied),
            table=st.just("split") if tied else st.sampled_from(["split", "whole"]),
            carries=st.booleans(),
            weighted=st.booleans(),
            frozen=st.sampled_from(places),
        )
    )


@st.composite
def gpts(draw: st.DrawFn) -> Model:
    """``fp.models.gpt`` of one or two blocks."""
    heads = draw(st.sampled_from([2, 1, 4]))
    return draw(
        st.builds(
            language.gpt,
            vocab=st.integers(2, 9),
            d_model=st.integers(1, 2).map(lambda head: heads * head),
            n_layers=st.integers(1, 2),
            n_heads=st.just(heads),
            seq_len=st.integers(1, 4),
            d_ff=st.sampled_from([4, 6, 12]),
            bias=st.booleans(),
            init_std=st.just(0.3),
            gelu=st.sampled_from(["tanh", "exact"]),
            dropout=st.sampled_from([0.0, 0.25]),
        )
    )


@st.composite
def llamas(draw: st.DrawFn) -> Model:
    """``fp.models.llama`` of one or two blocks, with any grouping of its heads."""
    heads = draw(st.sampled_from([2, 1, 4]))
    return draw(
        st.builds(
            language.llama,
            vocab=st.integers(2, 9),
            d_model=st.just(2 * heads),
            n_layers=st.integers(1, 2),
            n_heads=st.just(heads),
            seq_len=st.integers(1, 4),
            n_kv_heads=st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]),
            d_ff=st.sampled_from([4, 6, 12]),
            init_std=st.just(0.3),
            dropout=st.sampled_from([0.0, 0.25]),
        )
    )
