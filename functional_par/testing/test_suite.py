"""The suite on models drawn by hypothesis, or on the one that ``--model`` or FUNCTIONAL_PAR_MODEL names: what
``pytest --pyargs functional_par.testing`` runs.
"""

import os

from functional_par.testing.chosen import chosen

TestSuite = chosen(os.environ.get("FUNCTIONAL_PAR_MODEL", ""))
