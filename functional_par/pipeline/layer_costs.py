"""Costs of layers, which become costs of stages once the layers are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from functional_par.pipeline.costs import Costs

if TYPE_CHECKING:
    from functional_par.plan import Plan


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs for one microbatch, the loss included: name to seconds, and to bytes.

    Attributes:
        forward: seconds.
        input_backward: seconds until the cotangents of the layer's input are there.
        weight_backward: seconds of what can wait beyond that; zero for layers whose backward is one piece.
        saved: bytes that the layer keeps from forward to backward, parameters not counted.
        batch: shape of each field of the microbatch; None if it is not known.
        dtype: of parameters and activations.

    ``print`` shows a table.
    """

    forward: Mapping[str, float]
    input_backward: Mapping[str, float]
    weight_backward: Mapping[str, float]
    saved: Mapping[str, int]
    batch: Mapping[str, tuple[int, ...]] | None = None
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        from functional_par.report.layer_costs import layer_costs

        return layer_costs(self)

    @property
    def parts(self) -> dict[str, tuple[float, float, float]]:
        """Seconds of forward, input backward and weight backward of each layer."""
        return {name: (x, self.input_backward[name], self.weight_backward[name]) for name, x in self.forward.items()}

    @property
    def total(self) -> dict[str, float]:
        """Seconds of forward and backward together."""
        return {name: x + self.input_backward[name] + self.weight_backward[name] for name, x in self.forward.items()}

    def of_stages(self, plan: Plan, transfer: float = 0.0) -> Costs:
        """Costs of a plan's stages, for the simulator; ``transfer`` is the seconds of a message."""

        def sums(each: Mapping[str, float]) -> tuple[float, ...]:
            return tuple(
                sum(each[layer.name] for layer in plan.stage_layers(stage)) for stage in range(len(plan.stages))
            )

        return Costs(sums(self.forward), sums(self.input_backward), sums(self.weight_backward), transfer)
