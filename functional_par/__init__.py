"""functional_par: data, tensor and pipeline parallelism as composable functional transforms on torch."""

from functional_par import data, init, models, nn, optim, pipeline, testing
from functional_par.audit import audit
from functional_par.comm.base import World
from functional_par.config import Config
from functional_par.errors import (
    CommError,
    CompositionError,
    ConfigError,
    DataError,
    DeadlockError,
    MeshError,
    MismatchError,
    MissingCollective,
    ModelError,
    NonFiniteError,
    ParallelError,
    RankFailedError,
    ScheduleError,
    StateError,
    SuperfluousCollective,
    TraceError,
)
from functional_par.maps.leaf import Leaf
from functional_par.mesh import Mesh
from functional_par.model import Input, Layer, Model
from functional_par.par import Par, TensorParallelLinearMode, TensorParallelMode
from functional_par.pipeline.layer_costs import LayerCosts
from functional_par.pipeline.measure import measure
from functional_par.pipeline.memory import MemoryBound
from functional_par.plan import Plan
from functional_par.program import Program, compose
from functional_par.run import run
from functional_par.shards import shard, unshard
from functional_par.spec import Debt, Param, Spec
from functional_par.state import State
from functional_par.transforms import (
    Transform,
    dp_reduce,
    on_local_gradients,
    on_reduced_gradients,
    on_updates,
    precision,
    remat,
    reparam,
    shard_tp,
    stage_pp,
    tie,
)

__all__ = [
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
