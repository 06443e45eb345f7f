"""How many sequences a step reads and how they are cut: nanotron's two keys, or a batch that no layout changes."""

from __future__ import annotations

from dataclasses import dataclass

from functional_par.config.sections import Tokens
from functional_par.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """``size == replicas * microbatches * micro_size`` sequences a step."""

    size: int
    microbatches: int
    micro_size: int
    replicas: int


def resolve(tokens: Tokens, replicas: int, source: str = "config") -> Batch:
    """The batch of a step on ``replicas`` data-parallel replicas (the ranks along ep and dp).

    Any one of global size, microbatches a replica and sequences a microbatch follows from the other two. Without a
    number of microbatches it is 1.

    >>> resolve(Tokens(sequence_length=8, train_steps=1, global_batch_size=24, microbatches=3), replicas=4)
    Batch(size=24, microbatches=3, micro_size=2, replicas=4)

    Raises:
        ConfigError: with the numbers, if keys contradict each other, are too few, or do not divide.
    """
    size, micro = tokens.global_batch_size, tokens.micro_batch_size
    cuts = _same(tokens, source)
    if size is None and micro is None:
        raise ConfigError(
            f"{source}: tokens says no batch size: give tokens.global_batch_size or tokens.micro_batch_size."
        )
    if size is None:
        assert micro is not None  # for the type checker
        return Batch(micro * (cuts or 1) * replicas, cuts or 1, micro, replicas)
    if micro is None:
        cuts = cuts or 1
        micro = _divide(size, replicas, cuts, "microbatches", source)
    elif cuts is None:
        cuts = _divide(size, replicas, micro, "sequences a microbatch", source)
    if micro * cuts * replicas != size:
        raise ConfigError(
            f"{source}: tokens.global_batch_size is {size}, but tokens.micro_batch_size={micro} * {cuts} microbatches "
            f"* {replicas} data-parallel replicas = {micro * cuts * replicas}. Leave one of the three out."
        )
    return Batch(size, cuts, micro, replicas)


def _same(tokens: Tokens, source: str) -> int | None:
    here, there = tokens.microbatches, tokens.batch_accumulation_per_replica
    if here is not None and there is not None and here != there:
        raise ConfigError(
            f"{source}: tokens.microbatches is {here} and tokens.batch_accumulation_per_replica is {there}, "
            "but both are the microbatches a replica takes in one step. Keep one."
        )
    return here if here is not None else there


def _divide(size: int, replicas: int, parts: int, what: str, source: str) -> int:
    if size % (replicas * parts):
        raise ConfigError(
            f"{source}: tokens.global_batch_size={size} does not divide into {replicas} data-parallel replicas * "
            f"{parts} {what}. Take a multiple of {replicas * parts}."
        )
    return size // (replicas * parts)
