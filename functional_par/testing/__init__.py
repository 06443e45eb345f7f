"""Checks for programs of your own, against the plain function in one process."""

from functional_par.testing.equivalent import Difference, assert_equivalent, differences

__all__ = ["Difference", "assert_equivalent", "differences"]
