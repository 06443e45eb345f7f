"""Limits: products of keys that are fine alone; every refusal names the keys, the number and the limit."""

import pytest

from functional_par.config import Config
from functional_par.errors import ConfigError

GOOD = {
    "tokens": {"sequence_length": 8, "train_steps": 2, "global_batch_size": 8},
    "model": {"d_model": 16, "n_layers": 2, "n_heads": 4},
}
LARGEST = 2**31 - 1


def config(**keys):
    return Config.from_dict(GOOD, "x.yaml", {name.replace("__", "."): value for name, value in keys.items()})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"parallelism__dp": 1000, "parallelism__tp": 1000},
            r"dp=1000 \* parallelism\.tp=1000 = 1000000 ranks; at most 100",
        ),
        (
            {"model__d_model": 2**30},
            r"model\.d_ff=4294967296 \* the width model\.d_model=1073741824 = \d+ numbers in one",
        ),
        ({"model__vocab": 2**30, "model__d_model": 2**28}, r"model\.vocab=1073741824 \* .* at most 72057594037927936"),
        (
            {"model__d_ff": LARGEST, "tokens__global_batch_size": LARGEST},
            "model.d_ff=2147483647 = .* in one activation",
        ),
        (
            {"tokens__sequence_length": LARGEST},
            r"sequence_length=2147483647 .*n_heads=4 = \d+ numbers in the attention",
        ),
    ],
)
def test_what_is_too_large_to_be_planned_is_told_with_its_keys(keys, message):
    with pytest.raises(ConfigError, match=f"^x\\.yaml: .*{message}"):
        config(**keys)


def test_a_batch_that_its_parts_make_too_large_is_told():
    size = {"tokens__global_batch_size": None, "tokens__micro_batch_size": LARGEST}
    with pytest.raises(ConfigError, match=r"this makes 4294967294 sequences a step \(2 replicas \* 1 microbatches"):
        config(**size, parallelism__dp=2)
    with pytest.raises(ConfigError, match=r"this makes 20000 microbatches a replica .*at most 16384 are possible"):
        config(tokens__global_batch_size=20000, tokens__micro_batch_size=1)


def test_the_largest_models_that_there_are_pass():
    batch = {"tokens__global_batch_size": 16384, "parallelism__dp": 16384}
    config(**batch, model__d_model=65536, model__n_layers=1000, model__n_heads=512, model__vocab=10**6)
