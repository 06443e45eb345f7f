"""``dp_reduce``: copy every leaf to all data-parallel ranks and give each rank its share of the batch. The transpose of
the copy is a sum, so every leaf that meets the batch owes these axes; ``functional_par.reduce`` pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from functional_par.plan import Plan
from functional_par.transforms.base import Transform


@dataclass(frozen=True)
class DPReduce(Transform):
    """See ``dp_reduce``."""

    def __call__(self, plan: Plan) -> Plan:
        return replace(plan, data_axes=("ep", "dp")).use("ep", "dp")


def dp_reduce() -> DPReduce:
    """Split the batch over ep and dp. Gradients are sums over all rows, divided once by the global count of loss terms."""
    return DPReduce()
