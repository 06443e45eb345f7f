"""Checks for programs of your own, against the plain function in one process.

``assert_equivalent`` checks one program on one mesh. ``suite`` makes a test class that checks a model in every layout, and
``strategies`` are what it draws from; these two need hypothesis (``pip install 'functional_par[testing]'``), the rest does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from functional_par.testing.batch import Sample, make_batch
from functional_par.testing.equivalent import Difference, assert_equivalent, differences
from functional_par.testing.layout import Layout

if TYPE_CHECKING:
    from functional_par.testing import strategies
    from functional_par.testing.suites import suite

__all__ = [
    "Difference",
    "Layout",
    "Sample",
    "assert_equivalent",
    "differences",
    "make_batch",
    "strategies",
    "suite",
]


def __getattr__(name: str) -> Any:
    """``suite`` and ``strategies`` are imported when they are asked for, since they need hypothesis."""
    if name not in ("strategies", "suite"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "suite":
            return import_module("functional_par.testing.suites").suite
        return import_module("functional_par.testing.strategies")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f"functional_par.testing.{name} needs hypothesis: pip install 'functional_par[testing]'.", name="hypothesis"
        ) from error
