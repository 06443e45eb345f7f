"""The transforms: each file tells one, from its map on the plan to what follows at run time."""

from functional_par.transforms.base import Transform
from functional_par.transforms.dp_reduce import DPReduce, dp_reduce
from functional_par.transforms.own import OwnMap, on_local_gradients, on_reduced_gradients, on_updates
from functional_par.transforms.precision import Precision, precision
from functional_par.transforms.remat import Remat, remat
from functional_par.transforms.reparam import Reparam, reparam
from functional_par.transforms.shard_tp import ShardTP, shard_tp
from functional_par.transforms.stage_pp import StagePP, stage_pp
from functional_par.transforms.tie import Tie, tie

__all__ = [
    "DPReduce",
    "OwnMap",
    "Precision",
    "Remat",
    "Reparam",
    "ShardTP",
    "StagePP",
    "Tie",
    "Transform",
    "dp_reduce",
    "on_local_gradients",
    "on_reduced_gradients",
    "on_updates",
    "precision",
    "remat",
    "reparam",
    "shard_tp",
    "stage_pp",
    "tie",
]
