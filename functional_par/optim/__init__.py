"""Optimizers and learning-rate schedules: pure functions over flat dicts from a leaf's path to its tensor."""

from functional_par.optim.adamw import adamw
from functional_par.optim.base import Optimizer
from functional_par.optim.schedules import Schedule, constant, cosine, linear, one_minus_sqrt, schedule
from functional_par.optim.sgd import sgd

__all__ = ["Optimizer", "Schedule", "adamw", "constant", "cosine", "linear", "one_minus_sqrt", "schedule", "sgd"]
