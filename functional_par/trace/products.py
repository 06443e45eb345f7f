"""What the matrix products of a layer leave behind: results that may be kept, and what the gradients of weights wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_par.pipeline.products import PRODUCTS
from functional_par.trace.values import Value

_WITH_WEIGHTS = PRODUCTS | {torch.ops.aten.embedding.default}


class Products:
    """The products and look-ups of one layer's forward.

    Attributes:
        bytes: of the results of the products.
        attending: true inside of torch's attention, which is one operation where it runs.
    """

    def __init__(self) -> None:
        self.bytes, self.attending = 0, False
        self._pairs: list[torch.UntypedStorage] = []  # a tensor would keep its graph, and with it the trace, alive

    def note(self, func: Any, given: Sequence[Tensor], values: Sequence[Value], out: Any) -> None:
        """Note one operation: its tensors, what is known of them, and its result."""
        if self.attending or func not in _WITH_WEIGHTS:
            return
        if func in PRODUCTS:
            self.bytes += out.nbytes
        if any(value.sources for value in values):
            activations = (x for x, value in zip(given, values, strict=True) if value.data and x.is_floating_point())
            self._pairs += [x.untyped_storage() for x in (out, *activations)]

    def waiting(self) -> int:
        """Bytes of inputs, each once, and cotangents of products with weights and of look-ups."""
        return sum({storage._cdata: storage.nbytes() for storage in self._pairs}.values())
