"""``precision``: parameters and activations in a narrow dtype; sums of many terms, and what small updates add to, in a wide
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from functional_par.errors import CompositionError
from functional_par.plan import Plan
from functional_par.precision import Dtype, dtype_of
from functional_par.precision import Precision as Dtypes
from functional_par.transforms.base import Transform


@dataclass(frozen=True)
class Precision(Transform):
    """See ``precision``."""

    dtypes: Dtypes

    def __call__(self, plan: Plan) -> Plan:
        return replace(plan, precision=self.dtypes)


def precision(
    compute: Dtype = torch.bfloat16,
    accumulate: Dtype | None = None,
    reduce: Dtype | None = None,
    master: Dtype | None = None,
) -> Precision:
    """In which dtype each part of a step is done (mixed precision, arXiv 1710.03740; bfloat16, arXiv 1905.12322).

    Softmax, norms, rotary positions and the cross-entropy of ``fp.nn`` compute in float32 or better whatever is said here.
    Losses are not scaled: bfloat16 has the range of float32, so small gradients do not vanish. float16 has not, and is
    refused.

    Args:
        compute: of parameters and activations, and of what travels between layers and stages: a dtype, or its name
            (``"bf16"``).
        accumulate: in which gradients add up over microbatches. By default float32, or float64 for float64: of bfloat16's 8
            bits an addend keeps none in a sum that is 256 times as large.
        reduce: in which gradients are summed over ranks. By default as they accumulate; bfloat16 sends half of the bytes.
        master: of the optimizer's own copy of the parameters, its slot ``"master"``. After each step the parameters are its
            rounded values. By default float32, or float64 for float64; the same as ``compute`` keeps no copy, and loses
            updates smaller than half a unit of the last place.

    Raises:
        CompositionError: another dtype, or a master that is narrower than the parameters.

    >>> print(precision("bf16", reduce="bf16").dtypes)
    bfloat16, accumulate and master in float32
    """
    narrow = dtype_of("precision(compute", compute)
    wide = Dtypes.of(narrow)

    def given(name: str, value: Dtype | None, default: torch.dtype) -> torch.dtype:
        return default if value is None else dtype_of(f"precision({name}", value)

    total = given("accumulate", accumulate, wide.accumulate)
    result = Dtypes(narrow, total, given("reduce", reduce, total), given("master", master, wide.master))
    if result.master.itemsize < narrow.itemsize:
        raise CompositionError(
            f"precision(compute={narrow}, master={result.master}): the parameters are the master's rounded values, so the "
            "master is at least as wide. Make it so, or leave it out."
        )
    return Precision(result)
