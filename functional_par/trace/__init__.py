"""Inference of what every value varies over and of what every gradient owes. See ``infer`` for the rules."""

from functional_par.trace.infer import LayerTrace, Trace, trace
from functional_par.trace.setting import Setting
from functional_par.trace.values import Abstract, Use, Value

__all__ = ["Abstract", "LayerTrace", "Setting", "Trace", "Use", "Value", "trace"]
