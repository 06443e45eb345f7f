"""What a rank holds of some leaves when the ranks along the data axes share them out. Counted from the plan alone."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from functional_par.bucket import aligned
from functional_par.buckets import slices

if TYPE_CHECKING:
    from functional_par.plan import Plan


class Elements(NamedTuple):
    """Numbers of elements on one rank: parameters, gradients, and what the optimizer keeps one tensor for."""

    parameters: int
    gradients: int
    moved: int


def held_elements(plan: Plan, paths: Iterable[str]) -> Elements:
    """Of the first rank along the data axes, which has as much as any, but for a few elements by which places are rounded.

    Before the stages of a plan are cut it is not known what leaves owe; then trainable leaves count as cut over all data axes.
    """
    paths = list(paths)
    whole = {path: prod(plan.specs[path].local_shape(plan.mesh)) for path in paths}
    cut = _cut(plan, whole)
    held, trained = cut if plan.zero == 3 else whole, [path for path in paths if plan.specs[path].trainable]
    grads = cut if plan.zero > 1 else whole
    return Elements(
        sum(held[path] for path in paths), sum(grads[path] for path in trained), sum(cut[path] for path in trained)
    )


def _cut(plan: Plan, whole: dict[str, int]) -> dict[str, int]:
    """Elements of each leaf in this rank's slice of it."""
    if not plan.zero or not whole:
        return whole
    if plan.cut is not None:
        shared = {path for path in whole if plan.specs[path].trainable or plan.zero == 3}
        return {path: aligned(-(-aligned(n) // plan.replicas)) if path in shared else n for path, n in whole.items()}
    pp = min(set.intersection(*(set(plan.specs[path].owners) for path in whole)))
    own = slices(plan, plan.mesh.rank(pp=pp))
    return {path: own[path].elements if path in own else n for path, n in whole.items()}


def passing_elements(plan: Plan, layers: Iterable[str]) -> tuple[int, int]:
    """Elements of parameters that are gathered at most at a time, and of gradients that are not yet reduced: of two layers."""
    if plan.zero < 2 or plan.replicas == 1:
        return 0, 0
    chosen = set(layers)
    reads = [layer.paths for layer in plan.model.all_layers if layer.name in chosen]
    sizes = {path: prod(spec.local_shape(plan.mesh)) for path, spec in plan.specs.items()}
    whole = max((sum(sizes[path] for path in paths) for paths in reads), default=0)
    trained = max((sum(sizes[p] for p in paths if plan.specs[p].trainable) for paths in reads), default=0)
    return (2 * whole if plan.zero == 3 else 0), 2 * trained
