"""How the work is cut, into stages, microbatches and replicas, and in which order it runs, changes nothing."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

import functional_par as fp
from functional_par import Mesh
from functional_par.plan import Plan

from . import many, single
from .examples import few
from .inner import close
from .layouts import batch_of, chain, layouts, meshes, sequence

seeds = st.integers(0, 2**16)


@few(8, 0.4)
@given(layouts(meshes(6, pp=(2, 3, 4)), microbatches=5), seeds)
def test_both_schedules_give_the_same_bits_and_every_step_is_pure(layout, seed):
    batches = [batch_of(seed + i, layout.pieces, sequence(layout)) for i in range(2)]
    runs = [
        many.train(layout.but(schedule=schedule), batches, "adamw", clip=0.5, pure=pure)
        for schedule, pure in (("afab", False), ("1f1b", True))
    ]
    many.identical(*runs)


@few(8, 0.4)
@given(layouts(meshes(4, pp=(2, 3, 4), tp=(1,)), microbatches=5), seeds, st.booleans())
def test_stages_alone_change_no_bit_of_an_untied_leaf_for_any_split_and_number_of_microbatches(layout, seed, tied):
    # With a tie the sum over its owners is rounded in another order; one step without clipping keeps it from the others.
    layout = layout.but(mesh=Mesh(pp=layout.mesh.pp), ties=(("head", "embed"),) if tied else ())
    batches = [batch_of(seed + i, layout.pieces, sequence(layout)) for i in range(1 if tied else 2)]
    clip = None if tied else 0.5
    staged = many.train(layout, batches, "adamw", clip=clip)
    whole = many.train(layout.but(mesh=Mesh()), batches, "adamw", clip=clip)
    if not tied:
        many.identical(staged, whole)
    for name in ("head", "embed"):
        close(staged.weights.pop(name), whole.weights.pop(name), name)
    many.same_bits(staged.weights, whole.weights)
    many.equal(staged, whole)


ROWS = 12


@st.composite
def cuts(draw):
    """Two layouts that cut twelve rows, and the rows without a label: all of one microbatch of the first, and some more."""
    drawn = []
    for _ in range(2):
        layout = draw(layouts(meshes(6, tp=(1, 2)), microbatches=1))
        share = ROWS // (layout.mesh.ep * layout.mesh.dp)
        drawn.append(
            layout.but(blocks=2, microbatches=draw(st.sampled_from([m for m in (2, 3, 4, 6, 12) if share % m == 0])))
        )
    lost = draw(st.integers(0, drawn[0].pieces - 1))
    length = ROWS // drawn[0].pieces
    rows = {*range(lost * length, (lost + 1) * length), *draw(st.sets(st.integers(0, ROWS - 1), max_size=ROWS))}
    return [layout.but(split=even(4, layout.mesh.pp)) for layout in drawn], sorted(rows)


def even(layers, stages):
    return tuple(layers // stages + (i < layers % stages) for i in range(stages))


@few(8, 0.4)
@given(cuts(), seeds)
def test_losses_do_not_depend_on_how_the_batch_is_cut_though_labels_rows_and_whole_microbatches_are_ignored(
    drawn, seed
):
    found, ignored = drawn
    batches = [batch_of(seed, ROWS, 4, ignored), batch_of(seed + 1, ROWS, 4, ignored[::2])]
    expected = single.train(chain(2), batches, "momentum", clip=0.5)
    for layout in found:
        many.equal(many.train(layout, batches, "momentum", clip=0.5), expected)


@few(8, 0.4)
@given(st.data(), layouts(meshes(24), blocks=3))
def test_all_orders_of_the_transforms_make_the_same_plan(data, layout):
    model = chain(layout.blocks)
    four = layout.but(ties=(("head", "embed"),)).transforms()
    orders = list(permutations(four))
    assert len(orders) == 24
    start = Plan.start(model, layout.mesh, {})
    first = mapped(start, four)
    for order in orders:
        assert mapped(start, order) == first, order
    # What a program does after the transforms is a function of the plan that they made.
    order = data.draw(st.sampled_from(orders))
    assert fp.compose(*order)(model).plan(layout.mesh) == fp.compose(*four)(model).plan(layout.mesh)


def mapped(plan, transforms):
    for transform in transforms:
        plan = transform(plan)
    return plan
