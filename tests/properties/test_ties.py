"""tied == untied with summed gradients == single process, wherever the owners of a tie lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from . import many, single
from .examples import few
from .layouts import Layout, batch_of, chain, layouts, meshes, sequence

KINDS = {
    "one stage": ((0, 0),),
    "neighbours": ((0, 1), (1, 2)),
    "first and last": ((0, 2),),
    "three stages": ((0, 1, 2),),
    "two on one stage and one on another": ((0, 0, 1), (0, 0, 2)),
}
"""Stages of the owners, of three."""

PLACES = {0: ("block0", "block1"), 1: ("block2",), 2: ("block3",)}
BLOCKS, SPLIT = 4, (3, 1, 2)
LEAVES = ("norm", "up", "whole", "down", "bias")


@st.composite
def tied(draw):
    """Four blocks on three stages; each leaf of a block is tied in another of the kinds, maybe head and embedding too."""
    layout = draw(layouts(meshes(6, pp=(3,)), microbatches=3, blocks=1))
    kinds = draw(st.permutations(list(KINDS)))
    ties = [owners(draw, draw(st.sampled_from(KINDS[kind])), leaf) for leaf, kind in zip(LEAVES, kinds, strict=True)]
    if draw(st.booleans()):
        ties.append(("head", "embed"))
    return layout.but(blocks=BLOCKS, split=SPLIT, ties=tuple(draw(st.permutations(ties))))


def owners(draw, stages, leaf):
    """Names of the leaf in different blocks of these stages, in any order."""
    left = {stage: list(names) for stage, names in PLACES.items()}
    chosen = []
    for stage in stages:
        chosen.append(draw(st.sampled_from(left[stage])))
        left[stage].remove(chosen[-1])
    return tuple(f"{name}.{leaf}" for name in draw(st.permutations(chosen)))


@few(8, 0.4)
@given(tied(), st.integers(0, 2**16))
def test_tied_equals_untied_with_summed_gradients_and_one_process_over_any_owners(layout: Layout, seed: int):
    batches = [batch_of(seed + i, layout.pieces, sequence(layout)) for i in range(3)]
    program = layout.program()
    aliases = program.plan(layout.mesh).aliases
    assert aliases == {
        path: first for path, first in single.representatives(chain(BLOCKS), layout.ties).items() if path != first
    }
    summed = single.train(chain(BLOCKS), batches, "adamw", layout.ties, clip=0.5, seed=seed)
    as_one = single.train(program.model, batches, "adamw", clip=0.5, seed=seed)
    many.equal(under_every_name(as_one, aliases), summed)
    many.equal(many.train(layout, batches, "adamw", program, clip=0.5, seed=seed), summed)


def under_every_name(run: single.Trained, aliases) -> single.Trained:
    """Weights and moments of the model with ties, under the names of the model as written."""

    def named(leaves):
        return leaves | {path: leaves[first] for path, first in aliases.items()}

    slots = {slot: named(leaves) for slot, leaves in run.slots.items()}
    return single.Trained(run.losses, run.norms, run.tokens, named(run.weights), slots)
