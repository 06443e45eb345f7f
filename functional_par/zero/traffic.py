"""How often slices of parameters are gathered when a layer has its own only while it runs. See ``Gathered``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from functional_par.plan import Plan


def gathers(plan: Plan, pp: int, buckets: Sequence[Sequence[str]]) -> list[int]:
    """For each bucket, given by the paths of its leaves, how often a rank at a pp coordinate gathers it in a training step:
    once for each run of layers that need it, one right after the other."""
    needs = [{layer.name for layer in plan.layers_on(pp) if {*layer.paths} & {*paths}} for paths in buckets]
    needing = set[str]().union(*needs)
    order = [layer for layer in _order(plan, pp) if layer in needing]
    pairs = list(zip(order, [None, *order], strict=False))
    return [sum(layer in need and before not in need for layer, before in pairs) for need in needs]


def _order(plan: Plan, pp: int) -> Iterator[str]:
    """The layers that need their parameters, in the order in which they run: all of ``Part.order``, without a part."""
    for action in plan.timetable.rows[pp]:
        if action.kind != "W":
            names = [layer.name for layer in plan.stage_layers(action.stage)]
            yield from names if action.kind == "F" else reversed(names)
