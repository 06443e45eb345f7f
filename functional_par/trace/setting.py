"""Everything that a trace depends on besides the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from functional_par.trace.values import Axes


@dataclass(frozen=True)
class Setting:
    """Everything that the trace depends on besides the model.

    Attributes:
        sizes: axis sizes.
        active: the axes that some transform uses; on the others every value is replicated by definition.
        data: the active axes over which the batch varies.
        leaves: local shape of each leaf and the axes it is cut along.
        batch: local shape and dtype of each field of a microbatch.
        mode, async_comm: as in ``Par``.
        dtype: of the parameters.
    """

    sizes: Mapping[str, int]
    active: Axes
    data: Axes
    leaves: Mapping[str, tuple[tuple[int, ...], Axes]]
    batch: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    mode: Any
    async_comm: bool
    dtype: torch.dtype = torch.float32

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal settings alone."""
        maps = (tuple(sorted(each.items())) for each in (self.sizes, self.leaves, self.batch))
        return (self.active, self.data, *maps, self.mode, self.async_comm, self.dtype)
