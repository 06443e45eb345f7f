"""Checks for programs of your own, against the plain function in one process.

``assert_equivalent`` checks one program on one mesh. ``suite`` makes a test class that checks a model in every layout, and
``strategies`` are what it draws from; these two need hypothesis (``pip install 'functional_par[testing]'``), the rest does not.
"""

from functional_par.testing.batch import Sample, make_batch
from functional_par.testing.equivalent import Difference, assert_equivalent, differences

__all__ = ["Difference", "Sample", "assert_equivalent", "differences", "make_batch"]
