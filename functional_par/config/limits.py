"""Products of keys that are fine alone but too large together to be planned, and what does not fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from functional_par.config.batch import Batch
from functional_par.config.sections import LARGEST_SIZE, MOST_MICROBATCHES, MOST_RANKS, Parallelism, Sections
from functional_par.errors import ConfigError

LARGEST_TENSOR = 2**56
"""Elements: their bytes still fit into int64, with room for what a layer stacks."""


def check_ranks(parallelism: Parallelism, source: str) -> None:
    """Raise ConfigError if the mesh has more ranks than a plan can hold."""
    sizes = {axis: getattr(parallelism, axis) for axis in ("ep", "pp", "dp", "cp", "tp")}
    _check(source, {f"parallelism.{axis}": n for axis, n in sizes.items() if n > 1}, MOST_RANKS, "ranks")


def check_batch(batch: Batch, source: str) -> None:
    """Raise ConfigError for a batch whose parts are fine, but of which there are too many."""
    for what, number, most in (
        ("sequences a step", batch.size, LARGEST_SIZE),
        ("microbatches a replica", batch.microbatches, MOST_MICROBATCHES),
    ):
        if number > most:
            raise ConfigError(
                f"{source}: tokens: this makes {number} {what} ({batch.replicas} replicas * {batch.microbatches} "
                f"microbatches * {batch.micro_size} sequences); at most {most} are possible. Make the batch smaller."
            )


def check_tensors(sections: Sections, rows: int, source: str) -> None:
    """Raise ConfigError if a parameter or an activation of ``rows`` sequences has more elements than can be counted."""
    m, seq = sections.model, sections.tokens.sequence_length
    widths = {"model.vocab": m.vocab, "model.d_ff": m.d_ff or 4 * m.d_model, "model.d_model": m.d_model}
    here = {"sequences a microbatch": rows, "tokens.sequence_length": seq}
    for name, width in widths.items():
        _check(source, {name: width, "the width model.d_model": m.d_model}, LARGEST_TENSOR, "numbers in one parameter")
        _check(source, {**here, name: width}, LARGEST_TENSOR, "numbers in one activation")
    pairs = {**here, "as many keys": seq, "model.n_heads": m.n_heads}
    _check(source, pairs, LARGEST_TENSOR, "numbers in the attention weights")


def _check(source: str, factors: Mapping[str, int], most: int, what: str) -> None:
    if (number := prod(factors.values())) > most:
        product = " * ".join(f"{name}={n}" for name, n in factors.items())
        raise ConfigError(f"{source}: {product} = {number} {what}; at most {most} are possible. Make one smaller.")
