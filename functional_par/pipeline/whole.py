"""Whether a plan trains all of its model: every layer on one stage, every leaf where it is read, every gradient once."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from functional_par.buckets import buckets
from functional_par.errors import CompositionError
from functional_par.plan import Plan


def check_whole(plan: Plan) -> None:
    """Compare what the ranks of a plan hold and run with what the model has.

    Raises:
        CompositionError: layers that are on no stage, on two or out of order; stages on no rank; leaves that differ from the
            model's or are not with the stages that read them; gradients that are more or fewer than the trainable elements.
    """
    _check_layers(plan)
    _check_placement(plan)
    _check_leaves(plan)
    _check_gradients(plan)


def _check_layers(plan: Plan) -> None:
    want = [layer.name for layer in plan.model.layers]
    have = [name for names in plan.stages for name in names]
    if have == want:
        return
    wrong = {
        "on no stage": [name for name in want if name not in have],
        "on two stages": [name for name in dict.fromkeys(have) if have.count(name) > 1],
        "not in the model": [name for name in have if name not in want],
    }
    told = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
    raise CompositionError(
        f"{plan.mesh}: the model has {len(want)} layers, but its {len(plan.stages)} stages run {len(have)}: "
        f"{told or 'the order is another'}. The stages together are the model's list of layers, cut."
    )


def _check_placement(plan: Plan) -> None:
    where, pp = plan.placement, plan.mesh.pp
    if len(where) != len(plan.stages) or not all(0 <= at < pp for at in where):
        raise CompositionError(
            f"{plan.mesh}: {len(plan.stages)} stages lie on the pp coordinates {list(where)}. Each stage lies on one of 0 to "
            f"{pp - 1}."
        )
    if (runs := plan.timetable.placement) != where:
        raise CompositionError(
            f"{plan.mesh}: stages lie on the pp coordinates {list(where)}, but schedule {plan.timetable.name} runs them on "
            f"{list(runs)}. Take another schedule, or another split."
        )


def _check_leaves(plan: Plan) -> None:
    if plan.specs.keys() != plan.model.leaves.keys():
        other = sorted(plan.specs.keys() ^ plan.model.leaves.keys())
        raise CompositionError(
            f"{plan.mesh}: the plan places {len(plan.specs)} leaves, but the model has {len(plan.model.leaves)}; only one of "
            f"them has {', '.join(other)}."
        )
    for path, spec in plan.specs.items():
        leaf = plan.model.leaves[path]
        if (spec.shape, spec.trainable) != (leaf.shape, leaf.trainable):
            raise CompositionError(
                f"{plan.mesh}: the plan has {path} as {_words(spec.shape, spec.trainable)}, but in the model it is "
                f"{_words(leaf.shape, leaf.trainable)}."
            )
        read = {plan.placement[stage] for stage in plan.readers[path]}
        if set(spec.owners) != read:
            raise CompositionError(
                f"{plan.mesh}: {path} is read by stages on the pp coordinates {sorted(read)}, but held at "
                f"{list(spec.owners)}."
            )


def _check_gradients(plan: Plan) -> None:
    """The union of all ranks' gradients, each shard once, is one number for each trainable element of the model."""
    want = {path: prod(leaf.shape) for path, leaf in plan.model.leaves.items() if leaf.trainable}
    reduced = {
        path for pp in range(plan.mesh.pp) for bucket in buckets(plan, plan.mesh.rank(pp=pp)) for path in bucket.paths
    }
    have = {path: _covered(plan, path) for path in plan.specs if path in reduced}
    if have != want:
        raise CompositionError(
            f"{plan.mesh}: the ranks together have {sum(have.values()):,} gradients, but the model has {sum(want.values()):,} "
            f"trainable elements; they differ in {', '.join(_different(have, want))}."
        )


def _covered(plan: Plan, path: str) -> int:
    """Elements of a leaf in the union of its shards; padding counts for nothing."""
    spec = plan.specs[path]
    local = spec.local_shape(plan.mesh)
    parts = [getattr(plan.mesh, axis) if axis else 1 for axis in spec.axes]
    return prod(min(whole, part * n) for whole, part, n in zip(spec.shape, local, parts, strict=True))


def _different(have: Mapping[str, int], want: Mapping[str, int]) -> list[str]:
    return sorted(path for path in {**have, **want} if have.get(path) != want.get(path))


def _words(shape: tuple[int, ...], trainable: bool) -> str:
    return f"{'' if trainable else 'frozen '}{list(shape)}"
