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

    zero: int = 0
    bucket_mb: float = BUCKET_MB

    def __call__(self, plan: Plan) -> Plan:
        return replace(plan, data_axes=("ep", "dp"), zero=self.zero, bucket_mb=self.bucket_mb).use("ep", "dp")

    def check(self, plan: Plan) -> None:
        """Maps of the user's own get whole shards, which are nowhere when ranks share them out."""
        if self.zero and plan.maps:
            raise CompositionError(
                f"{plan.maps[0].name} acts on whole gradients or updates, but with dp_reduce(zero={self.zero}) each rank has a "
                "slice of them. Leave one of the two out."
            )


def dp_reduce(*, zero: int = 0, bucket_mb: float = BUCKET_MB) -> DPReduce:
    """Split the batch over ep and dp. Gradients are sums over all rows, divided once by the global count of loss terms.

    Args:
        zero: what the ranks along ep and dp share out instead of keeping copies, each a slice of every leaf (Rajbhandari et al.
            2020, https://arxiv.org/abs/1910.02054). 0: nothing. 1: the optimizer's state; no more bytes are sent. 2: gradients
            too, which are reduced once a microbatch. 3: parameters too, which are gathered for a layer at a time, once for its
            forward and once for its backward, the next layer's while one runs. Results are the same up to the order of sums.
        bucket_mb: most MiB of float32 gradients that are summed in one collective. It starts while the layers before are
            still in their backward. A leaf that is larger has one of its own. Not for ``zero`` 2 and 3, which reduce layer by
            layer.

    Raises:
        CompositionError: another number, or a size that is not positive; when a plan is made, maps of the user's own on
            gradients or updates beside ``zero``.
    """
    if isinstance(zero, bool) or zero not in (0, 1, 2, 3):
        raise CompositionError(
            f"dp_reduce(zero={zero!r}): it is 0 (nothing is shared out), 1 (the optimizer's state), 2 (gradients too) or 3 "
            "(parameters too)."
        )
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise CompositionError(
            f"dp_reduce(bucket_mb={bucket_mb!r}): a bucket holds a positive number of MiB, such as {BUCKET_MB:g}."
        )
    return DPReduce(zero, bucket_mb)
