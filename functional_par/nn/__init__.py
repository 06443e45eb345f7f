"""Layers that know how their weights are split over tp, each one function that also runs in a single process."""

from functional_par.nn.attention import attention
from functional_par.nn.cross_entropy import cross_entropy
from functional_par.nn.dropout import dropout
from functional_par.nn.embedding import embedding
from functional_par.nn.linear import column_linear, row_linear
from functional_par.nn.linear_cross_entropy import linear_cross_entropy
from functional_par.nn.mlp import gelu_mlp, swiglu_mlp
from functional_par.nn.norm import layer_norm, rms_norm
from functional_par.nn.rotary import rotary
from functional_par.nn.stream import sequence_window

__all__ = [
    "attention",
    "column_linear",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu_mlp",
    "layer_norm",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "row_linear",
    "sequence_window",
    "swiglu_mlp",
]
