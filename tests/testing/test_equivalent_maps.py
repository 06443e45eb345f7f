"""Programs with maps of their own on gradients and updates are compared with themselves on one rank."""

from __future__ import annotations

import pytest

import functional_par as fp
from functional_par.testing import assert_equivalent
from tests.toys import small_llama

MESH = fp.Mesh(dp=2, tp=2)
RANKS = (fp.shard_tp("REDUCE_SCATTER"), fp.dp_reduce())


def clip(grad, leaf):
    return grad * (0.1 / leaf.norm(grad)).clamp(max=1.0)


def of_the_block(grad, leaf):
    """Signs times the mean size of this rank's block: what an approximation does is its author's to answer for."""
    return leaf.approximate(grad, lambda block: block.sign() * block.abs().mean())


def test_a_map_that_every_layout_computes_alike_is_equivalent():
    own = (fp.on_reduced_gradients(clip), fp.on_updates(lambda update, leaf: 0.5 * update))
    program = fp.compose(*own, *RANKS)(small_llama())
    assert_equivalent(program, MESH, steps=2, optimizer=fp.optim.adamw(lr=0.1))


def test_a_map_that_depends_on_the_layout_is_not():
    program = fp.compose(fp.on_reduced_gradients(of_the_block, "*.mlp.up.weight"), *RANKS)(small_llama())
    with pytest.raises(AssertionError, match=r"gradient of blocks\.0\.mlp\.up\.weight: off by"):
        assert_equivalent(program, MESH)
