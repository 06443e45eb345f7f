"""What people see of a run: the header, the progress, the metrics file, and how it ends."""

from functional_par.report.exits import exit_code
from functional_par.report.header import explained, header
from functional_par.report.prepare import prepare, say
from functional_par.report.progress import progress
from functional_par.report.step_trace import traced

__all__ = ["exit_code", "explained", "header", "prepare", "progress", "say", "traced"]
