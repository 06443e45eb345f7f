"""``fp.audit``: a program on a mesh against its model in one process, by the numbers, with a diagnosis."""

from functional_par.audit.audit import audit
from functional_par.audit.finding import Audit, Difference, Finding

__all__ = ["Audit", "Difference", "Finding", "audit"]
