"""Measured costs of layers as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from functional_par.report.text import fields, size, table

if TYPE_CHECKING:
    from functional_par.pipeline.layer_costs import LayerCosts


def layer_costs(costs: LayerCosts) -> str:
    """A row for each layer, in milliseconds and bytes, and one for all together; then what was measured."""
    times = (costs.forward, costs.input_backward, costs.weight_backward)
    rows: list[tuple[str, ...]] = [("layer", "forward ms", "input-backward ms", "weight-backward ms", "saved")]
    for name in costs.forward:
        saved = size(costs.saved[name]) if name in costs.saved else "-"
        rows.append((name, *(f"{1e3 * each[name]:.3f}" for each in times), saved))
    rows.append(("all", *(f"{1e3 * sum(each.values()):.3f}" for each in times), size(sum(costs.saved.values()))))
    if costs.batch is None:
        return table(rows)
    kind = str(costs.dtype).removeprefix("torch.")
    return f"{table(rows)}\n\na microbatch with {fields(costs.batch)} in {kind}"
