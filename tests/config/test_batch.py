"""Batch sizes: nanotron's two keys, a batch that no layout changes, and every contradiction."""

import pytest

from functional_par.config.batch import Batch, resolve
from functional_par.config.sections import Tokens
from functional_par.errors import ConfigError


def batch(replicas, **tokens):
    return resolve(Tokens(sequence_length=4, train_steps=1, **tokens), replicas, "x.yaml")


def test_nanotrons_keys_mean_what_they_mean_there():
    assert batch(4, micro_batch_size=3, batch_accumulation_per_replica=2) == Batch(24, 2, 3, 4)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_global_batch_size_is_the_same_on_every_layout(replicas):
    assert batch(replicas, global_batch_size=24, microbatches=3) == Batch(24, 3, 8 // replicas, replicas)


def test_any_of_the_three_follows_from_the_other_two():
    assert batch(2, global_batch_size=24, micro_batch_size=4) == Batch(24, 3, 4, 2)
    assert batch(2, global_batch_size=24, micro_batch_size=4, microbatches=3) == Batch(24, 3, 4, 2)
    assert batch(2, global_batch_size=24) == Batch(24, 1, 12, 2)
    assert batch(2, micro_batch_size=5) == Batch(10, 1, 5, 2)
    assert batch(2, microbatches=3, batch_accumulation_per_replica=3, micro_batch_size=1) == Batch(6, 3, 1, 2)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({}, "tokens says no batch size: give tokens.global_batch_size or tokens.micro_batch_size"),
        (
            {"micro_batch_size": 1, "microbatches": 2, "batch_accumulation_per_replica": 3},
            "tokens.microbatches is 2 and tokens.batch_accumulation_per_replica is 3",
        ),
        (
            {"global_batch_size": 10, "micro_batch_size": 2, "microbatches": 3},
            r"global_batch_size is 10, but tokens.micro_batch_size=2 \* 3 microbatches \* 2 data-parallel repl.* = 12",
        ),
        (
            {"global_batch_size": 10, "microbatches": 3},
            r"size=10 does not divide into 2 data-parallel replicas \* 3 microbatches. Take a multiple of 6",
        ),
        (
            {"global_batch_size": 10, "micro_batch_size": 3},
            r"does not divide into 2 data-parallel replicas \* 3 sequences a microbatch. Take a multiple of 6",
        ),
        ({"global_batch_size": 3}, "Take a multiple of 2"),
    ],
)
def test_a_contradiction_is_told_with_the_numbers(tokens, message):
    with pytest.raises(ConfigError, match=f"^x.yaml: .*{message}"):
        batch(2, **tokens)
