"""``suite``: all properties of a model in one test class, for a line in a test file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, lcm
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from functional_par.errors import ModelError, TraceError
from functional_par.mesh import Mesh
from functional_par.model import Model
from functional_par.testing import properties
from functional_par.testing.batch import Sample
from functional_par.testing.case import Case, Given
from functional_par.testing.layout import MODES, Layout, refusal
from functional_par.testing.purity import the_step_is_pure
from functional_par.testing.strategies import USED, layouts, samples
from functional_par.transforms import Transform

EXAMPLES = 20
"""Of each property, where the profile of hypothesis leaves their number at its default."""

DATA = ("dp", "ep")


def suite(
    model: Model | Callable[[], Model] | SearchStrategy[Model],
    *transforms: Transform,
    max_ranks: int = 4,
    axes: Sequence[str] = USED,
    modes: Sequence[str] = MODES,
    batch: Callable[[int, int], Mapping[str, Tensor]] | None = None,
    ties: bool = True,
    max_examples: int | None = None,
) -> type:
    """A test class that checks a model in many layouts against the model in one process, on threads and in float64.

    In a test file, ``TestMine = functional_par.testing.suite(make_model)`` is all; pytest collects one test a property:
    layouts (mesh, mode, schedule, microbatches, split, engine, ties of leaves that are alike) and batches (ignored labels, rows
    and microbatches without any) are drawn by hypothesis, which shows the smallest case that fails. Take a model of a few
    hundred weights: every example trains it for a step or two.

    Args:
        model: a model, a function without arguments that makes it, or a strategy that draws one.
        transforms: that the program has besides those of the layout, such as ``fp.tie``, or ``fp.shard_tp(dims=...)`` for the
            dims that it cuts. Maps on gradients that are no sum have no counterpart in one process.
        max_ranks: largest mesh.
        axes: of the mesh that may be larger than one.
        modes: of tensor parallelism that the model is made for.
        batch: ``(rows, seed) -> batch``, for a model whose inputs are not described by ``model.batch``; by default
            ``make_batch`` makes them up.
        ties: whether leaves that are alike may be tied.
        max_examples: of each property; by default the number of the profile of hypothesis that is in use, or 20 where
            that has hypothesis' own 100.

    Raises:
        ModelError: if ``model`` is none of these.
    """
    fixed, drawn = _models(model)
    among = Range(drawn, Given(transforms, batch, fixed is not None), max_ranks, tuple(axes), tuple(modes), ties)
    chosen = settings(
        max_examples=default_examples() if max_examples is None else max_examples,
        deadline=None,
        # Which parts of a case do not matter would take more runs than finding the smallest.
        phases=[phase for phase in settings().phases if phase is not Phase.explain],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    staged = "pp" in among.axes and (fixed is None or len(fixed.layers) > 1)
    tests: dict[str, Any] = {
        f"test_{check.__name__}": chosen(given(case=cases(among))(_method(check)))
        for check, cases, needs_stages in PROPERTIES
        if staged or not needs_stages
    }
    if fixed is not None:
        tests["test_each_axis_alone_equals_one_process"] = lambda self: _each_alone(fixed, among)
    if fixed is not None and "tp" in among.axes and max_ranks > 1:
        tests["test_tensor_parallelism_is_possible"] = lambda self: _possible(fixed, among)
    return type("Suite", (), tests)


def _models(model: Any) -> tuple[Model | None, SearchStrategy[Model]]:
    if isinstance(model, SearchStrategy):
        return None, model
    made = model() if callable(model) and not isinstance(model, Model) else model
    if not isinstance(made, Model):
        raise ModelError(
            f"suite({model!r}): it takes an fp.Model, a function without arguments that makes one, or a strategy of them; "
            f"this gives {type(made).__name__}. Transforms are further arguments: suite(model, fp.tie(...))."
        )
    return made, st.just(made)


def default_examples() -> int:
    """Of the profile in use; a profile that says nothing has the number of hypothesis' own."""
    number = settings().max_examples
    return EXAMPLES if number == settings.get_profile("default").max_examples else number


def _method(check: Callable[[Case], None]) -> Callable[..., None]:
    def test(self: Any, case: Case) -> None:
        check(case)

    # The name tells the examples of one property from those of another.
    test.__name__ = test.__qualname__ = f"test_{check.__name__}"
    test.__doc__ = check.__doc__
    return test


def _each_alone(model: Model, among: Range) -> None:
    """Two ranks along each axis, each mode, and two microbatches: few drawn layouts may leave one of these out."""
    modes = tuple(mode for mode, why in _reasons(model, among).items() if not why)
    meshes = [Mesh(**{axis: 2}) for axis in among.axes if among.max_ranks > 1]
    layouts = [Layout(mesh, mode) for mesh in meshes for mode in (modes if mesh.tp > 1 else modes[:1])]
    for layout in [Layout(microbatches=2), *layouts]:
        staged = layout.mesh.pp <= len(model.layers)
        if staged and modes and not refusal(model, layout, *among.given.others):
            samples = (Sample(2 * layout.pieces, size=2 * layout.mesh.tp, kept=(0, 1)),)
            properties.every_layout_equals_one_process(Case(model, layout, samples, given=among.given))


def _possible(model: Model, among: Range) -> None:
    """Every mode has the collectives that it needs, and some layout cuts the model; else the other tests would say nothing of
    them."""
    wrong = _reasons(model, among)
    if any(wrong.values()):
        right = tuple(mode for mode in among.modes if not wrong[mode])
        lines = "\n".join(f"  {mode}: {why}" for mode, why in wrong.items() if why)
        hint = f" If the model is not meant for the others, which all other tests leave out, say so: suite(..., modes={right})."
        raise AssertionError(f"a collective is wrong.{hint if right else ''}\n{lines}")
    tried = [Layout(Mesh(tp=tp), mode) for tp in range(2, among.max_ranks + 1) for mode in among.modes]
    refusals = {f"tp={layout.mesh.tp}, {layout.mode}": refusal(model, layout, *among.given.others) for layout in tried}
    if all(refusals.values()):
        lines = "\n".join(f"  {layout}: {why}" for layout, why in refusals.items())
        raise AssertionError(
            f"no tp of 2 to {among.max_ranks} has a plan. Give the model sizes that divide, or say that it is not meant for "
            f"tensor parallelism: suite(..., axes=('pp', 'dp')).\n{lines}"
        )


def _reasons(model: Model, among: Range) -> dict[str, str]:
    """For each mode which collective is wrong in it, whatever the sizes; "" if none is."""
    reasons = dict.fromkeys(among.modes, "")
    for mode in reasons:
        try:
            refusal(model, Layout(mode=mode), *among.given.others)
        except TraceError as error:
            reasons[mode] = str(error)
    return reasons


@dataclass(frozen=True)
class Range:
    """From what the cases of a suite are drawn; see ``suite``."""

    models: SearchStrategy[Model]
    given: Given
    max_ranks: int
    axes: tuple[str, ...]
    modes: tuple[str, ...]
    ties: bool
    _made: dict[Any, SearchStrategy[Layout]] = field(default_factory=dict, compare=False, repr=False)

    def layouts(self, model: Model, axes: Sequence[str] = USED, stages: int = 1, ties: bool = False) -> Any:
        """Layouts of a model, of which only these axes may be larger than one, with at least that many stages. What the
        strategy finds out of a fixed model is kept."""
        key = (tuple(axis for axis in self.axes if axis in axes), stages, ties)
        if not self.given.fixed:
            return self._make(model, *key)
        if key not in self._made:
            self._made[key] = self._make(model, *key)
        return self._made[key]

    def _make(self, model: Model, axes: tuple[str, ...], stages: int, ties: bool) -> SearchStrategy[Layout]:
        others, modes = self.given.others, self.modes
        if self.given.fixed:
            # What is wrong in one mode alone is told once, by the test that tensor parallelism is possible.
            modes = tuple(mode for mode, why in _reasons(model, self).items() if not why) or modes
        options: Any = {"max_ranks": self.max_ranks, "axes": axes, "stages": stages, "ties": ties and self.ties}
        return layouts(model, *others, modes=modes, **options)


def _batches(draw: st.DrawFn, model: Model, layout: Layout, steps: int, pieces: int | None = None) -> tuple[Any, ...]:
    """A batch a step, of another number of rows in each."""
    pieces = layout.pieces if pieces is None else pieces
    rows = [pieces * draw(st.integers(1, 2)) for _ in range(steps)]
    return tuple(draw(samples(model, n, pieces, layout.mesh.tp)) for n in rows)


clips = st.sampled_from([None, 0.1, 1.0])
norms = st.sampled_from([2.0, 1.0, inf])


@st.composite
def _any(draw: st.DrawFn, among: Range) -> Case:
    model = draw(among.models)
    layout = draw(among.layouts(model, ties=True))
    batches = _batches(draw, model, layout, draw(st.integers(1, 3)))
    return Case(model, layout, batches, clip=draw(clips), norm=draw(norms), given=among.given)


@st.composite
def _cut(draw: st.DrawFn, among: Range) -> Case:
    model = draw(among.models)
    layout = draw(among.layouts(model, DATA).filter(lambda layout: layout.pieces > 1))
    return Case(model, layout, _batches(draw, model, layout, 1), given=among.given)


@st.composite
def _staged(draw: st.DrawFn, among: Range, axes: Sequence[str]) -> Case:
    model = draw(among.models)
    layout = draw(among.layouts(model, axes, stages=2))
    return Case(model, layout, _batches(draw, model, layout, 2), clip=draw(clips), norm=draw(norms), given=among.given)


@st.composite
def _ordered(draw: st.DrawFn, among: Range) -> Case:
    model = draw(among.models)
    layout = draw(among.layouts(model, ties=True))
    n = len(layout.transforms(*among.given.others))
    return Case(model, layout, order=tuple(draw(st.permutations(range(n)))), given=among.given)


@st.composite
def _moved(draw: st.DrawFn, among: Range) -> Case:
    model = draw(among.models)
    layout, other = draw(among.layouts(model)), draw(among.layouts(model))
    wide = Layout(Mesh(tp=lcm(layout.mesh.tp, other.mesh.tp)))
    batches = _batches(draw, model, wide, 2, lcm(layout.pieces, other.pieces))
    return Case(model, layout, batches, other, clip=draw(clips), norm=draw(norms), given=among.given)


PROPERTIES: tuple[tuple[Callable[[Case], None], Callable[[Range], SearchStrategy[Case]], bool], ...] = (
    (properties.every_layout_equals_one_process, _any, False),
    (properties.the_cut_of_the_batch_does_not_matter, _cut, False),
    (properties.schedules_give_the_same_bits, lambda among: _staged(among, USED), True),
    (properties.a_pipeline_alone_changes_no_bit, lambda among: _staged(among, ("pp",)), True),
    (properties.orders_of_transforms_give_equal_plans, _ordered, False),
    (the_step_is_pure, _any, False),
    (properties.training_goes_on_in_another_layout, _moved, False),
)
"""A property, its cases, and whether they need stages."""
