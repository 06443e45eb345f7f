"""The public names are a promise: this list changes only on purpose."""

import functional_par as fp

PUBLIC = [
    "CommError",
    "CompositionError",
    "Config",
    "ConfigError",
    "DataError",
    "DeadlockError",
    "Debt",
    "Input",
    "Layer",
    "LayerCosts",
    "Leaf",
    "MemoryBound",
    "Mesh",
    "MeshError",
    "MismatchError",
    "MissingCollective",
    "Model",
    "ModelError",
    "NonFiniteError",
    "Par",
    "ParallelError",
    "Param",
    "Plan",
    "Program",
    "RankFailedError",
    "ScheduleError",
    "Spec",
    "State",
    "StateError",
    "SuperfluousCollective",
    "TensorParallelLinearMode",
    "TensorParallelMode",
    "TraceError",
    "Transform",
    "World",
    "audit",
    "compose",
    "data",
    "dp_reduce",
    "init",
    "measure",
    "models",
    "nn",
    "on_local_gradients",
    "on_reduced_gradients",
    "on_updates",
    "optim",
    "pipeline",
    "precision",
    "remat",
    "reparam",
    "run",
    "shard",
    "shard_tp",
    "stage_pp",
    "testing",
    "tie",
    "unshard",
]


def test_the_public_names_are_these() -> None:
    assert sorted(fp.__all__) == sorted(PUBLIC)
    assert all(hasattr(fp, name) for name in PUBLIC)


def test_every_public_function_and_class_says_what_it_is() -> None:
    for name in PUBLIC:
        assert (getattr(fp, name).__doc__ or "").strip(), name


def test_nanotrons_name_of_the_mode_is_the_same_thing() -> None:
    assert fp.TensorParallelLinearMode is fp.TensorParallelMode
    assert fp.TensorParallelMode.parse("reduce-scatter") is fp.TensorParallelMode.REDUCE_SCATTER
