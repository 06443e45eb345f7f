"""``dp_reduce``: copy every leaf to all data-parallel ranks and give each rank its share of the batch. The transpose of
the copy is a sum, so every leaf that meets the batch owes these axes; ``functional_par.reduce`` pays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from functional_par.errors import CompositionError
from functional_par.plan import Plan
from functional_par.transforms.base import Transform

BUCKET_MB = 48.0
"""The sum of the last bucket has nothing left to hide behind, so buckets are not large; each is a collective, so not small."""


@dataclass(frozen=True)
class DPReduce(Transform):
    """See ``dp_reduce``."""

    bucket_mb: float = BUCKET_MB

    def __call__(self, plan: Plan) -> Plan:
        return replace(plan, data_axes=("ep", "dp"), bucket_mb=self.bucket_mb).use("ep", "dp")


def dp_reduce(bucket_mb: float = BUCKET_MB) -> DPReduce:
    """Split the batch over ep and dp. Gradients are sums over all rows, divided once by the global count of loss terms.

    Args:
        bucket_mb: most MiB of float32 gradients that are summed in one collective. It starts while the layers before are
            still in their backward. A leaf that is larger has one of its own.

    Raises:
        CompositionError: a size that is not positive.
    """
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise CompositionError(
            f"dp_reduce(bucket_mb={bucket_mb!r}): a bucket holds a positive number of MiB, such as {BUCKET_MB:g}."
        )
    return DPReduce(bucket_mb)
