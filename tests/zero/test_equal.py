"""Ranks that share out optimizer, gradients and parameters compute what ranks do that keep copies of them all."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import functional_par as fp
from functional_par import Mesh, tree

from ..oracle import adamw, token_batch
from ..toys import VOCAB, odd, small_gpt, small_llama

TIE = fp.tie("head.weight", "embed.weight")
ROWS, SEQ = 12, 4
CLOSE = 1e-12
SMALL = 1e-3  # MiB: a few leaves in each bucket


@dataclass(frozen=True)
class Setup:
    """A model in a layout."""

    mesh: Mesh
    model: Any
    vocab: int
    others: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def program(self, zero):
        return fp.compose(*self.others, fp.dp_reduce(zero=zero, bucket_mb=SMALL))(self.model())


SETUPS = {
    "dp2": Setup(Mesh(dp=2), lambda: small_gpt(blocks=1), 13, options={"norm": math.inf}),
    "dp3, empty slices, a frozen leaf": Setup(Mesh(dp=3), lambda: odd(False), VOCAB, options={"norm": 1.0}),
    "dp2 tp2, partial norms": Setup(
        Mesh(dp=2, tp=2), lambda: small_gpt(blocks=1), 13, (TIE, fp.shard_tp("REDUCE_SCATTER"))
    ),
    "dp2 pp2, a tie": Setup(Mesh(dp=2, pp=2), small_gpt, 13, (TIE, fp.stage_pp("interleaved-zb", 2))),
    "ep2 dp2": Setup(Mesh(ep=2, dp=2), lambda: small_llama(blocks=1), 13, (fp.stage_pp(microbatches=3),)),
}

VARIANTS = {1: [("tape", True)], 2: [("tape", False)], 3: [("tape", True), ("func", False)]}


def trained(setup, zero, variants, batches):
    """For each variant and step the metrics, and at the end the whole parameters and slots."""
    program = setup.program(zero)

    def main(world):
        found = []
        for engine, donate in variants:
            options = {"clip": 0.1, "dtype": torch.float64, **setup.options}
            step = program.step(world, adamw(), engine=engine, donate=donate, **options)
            state, metrics = step.init(3), []
            for batch in batches:
                state, more = step(state, batch)
                metrics += [more["loss"], more["grad_norm"], float(more["tokens"])]
            metrics.append(step.evaluate(state, batches[0])["loss"])
            found.append((metrics, tree.flatten(step.gather(state)), tree.flatten(step.gather_opt(state))))
        return found

    ranks = fp.run(main, setup.mesh, backend="threads", timeout=120.0)
    for other in ranks[1:]:
        for (metrics, params, opt), (metrics0, params0, opt0) in zip(other, ranks[0], strict=True):
            assert metrics == metrics0
            assert all(torch.equal(x, {**params0, **opt0}[path]) for path, x in {**params, **opt}.items())
    return ranks[0]


def close(found, expected):
    metrics, params, opt = found
    for a, b in zip(metrics, expected[0], strict=True):
        assert abs(a - b) <= CLOSE * max(1.0, abs(b))
    for mine, theirs in ((params, expected[1]), (opt, expected[2])):
        assert mine.keys() == theirs.keys()
        for path, x in theirs.items():
            assert (mine[path] - x).abs().max() <= CLOSE * max(1.0, x.abs().max()), path


@pytest.mark.parametrize("name", SETUPS)
def test_losses_norms_parameters_and_optimizer_are_those_of_copies(name):
    setup = SETUPS[name]
    batches = [token_batch(setup.vocab, ROWS, SEQ, seed) for seed in (0, 1)]
    (expected,) = trained(setup, 0, [("tape", False)], batches)
    for zero, variants in VARIANTS.items():
        for found in trained(setup, zero, variants, batches):
            close(found, expected)
