"""Gradient norms, clipping and the state of the optimizer are those of one process in every layout."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from . import many, single
from .examples import few
from .layouts import batch_of, chain, layouts, meshes, sequence

TIES = (
    ("head", "embed"),
    ("block0.norm", "block1.norm"),
    ("block0.bias", "block0.norm"),
    ("block0.whole", "block1.whole"),
)


@st.composite
def cases(draw):
    layout = draw(layouts(meshes(6), microbatches=2))
    if layout.blocks > 1:
        layout = layout.but(ties=tuple(draw(st.lists(st.sampled_from(TIES), max_size=2, unique=True))))
    return layout


shares = st.floats(0.1, 1.5)


@few(8, 0.4)
@given(
    cases(), st.permutations(list(single.OPTIMIZERS)), st.lists(shares, min_size=3, max_size=3), st.integers(0, 2**16)
)
def test_norms_clipping_and_moments_equal_those_of_torch_in_one_process(layout, optimizers, shares, seed):
    batches = [batch_of(seed + i, layout.pieces, sequence(layout)) for i in range(3)]
    model, program = chain(layout.blocks), layout.program()
    for optimizer, norm, share in zip(optimizers, (1.0, 2.0, math.inf), shares, strict=False):
        free = single.train(model, batches[:1], optimizer, layout.ties, norm=norm, seed=seed)
        clip = max(share * free.norms[0], 1e-3)
        expected = single.train(model, batches, optimizer, layout.ties, clip, norm, seed)
        many.equal(many.train(layout, batches, optimizer, program, clip=clip, norm=norm, seed=seed), expected)
