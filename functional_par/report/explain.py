"""``explain``: a plan as text for a design review. What lies where, what each gradient owes and why, who pays, how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from functional_par.bucket import Bucket
from functional_par.buckets import buckets
from functional_par.pipeline.told import Told, check_shapes, shapes_of
from functional_par.plan import Plan
from functional_par.precision import Precision
from functional_par.report.memory import held_by
from functional_par.report.stages import precision_of, stages
from functional_par.report.text import braces, ranges, size, table
from functional_par.report.traffic import sent
from functional_par.spec import Debt, Spec

ZERO = {
    1: "each keeps and moves the optimizer's state of its slices; parameters are gathered after each bucket's update",
    2: "each keeps gradients and optimizer state of its slices; what a layer adds for a microbatch is reduced at once",
    3: "each keeps slices of all; parameters are gathered for a layer at a time, for its forward and for its backward",
}
"""What the ranks along the data axes share out."""


@dataclass(frozen=True)
class Explanation:
    """A plan in words. ``print`` it.

    Attributes:
        plan: what is explained.
    """

    plan: Plan

    def __str__(self) -> str:
        parts = [_header(self.plan), stages(self.plan), sent(self.plan), _leaves(self.plan), _buckets(self.plan)]
        return "\n\n".join(part for part in parts if part)


def explain(plan: Plan, batch: Mapping[str, Tensor | Sequence[int]] | None = None) -> Explanation:
    """Explain a finished plan.

    Args:
        plan: what is explained.
        batch: a microbatch, or the shape of each of its fields, by which activations are counted; by default as the plan was
            told, else one row of the sizes that the model declares, small where it leaves them open.

    Raises:
        CompositionError: fields or shapes that the model does not take.
    """
    if batch is None:
        return Explanation(plan)
    shapes = shapes_of(batch)
    check_shapes(plan.model, shapes, "explain(batch=...)")
    return Explanation(replace(plan, told=replace(plan.told, batch=shapes) if plan.told else Told(shapes)))


def _header(plan: Plan) -> str:
    parameters = sum(prod(spec.shape) for spec in plan.specs.values())
    most = max(held_by(plan, pp) for pp in range(plan.mesh.pp))
    lines = [
        f"{plan.mesh}: {plan.mesh.size} rank{'s' if plan.mesh.size > 1 else ''}, "
        f"{parameters:,} parameters, at most {most:,} a rank"
    ]
    if plan.precision not in (None, Precision.of(torch.float32)):
        lines.append(f"precision         {plan.precision}")
    if "tp" in plan.active:
        lines.append(f"tensor parallel   {plan.mode.value}, async_comm={plan.async_comm}")
    if "pp" in plan.active:
        stages, pieces = len(plan.stages), plan.microbatches
        lines.append(f"pipeline          {plan.schedule}, stages: {stages}, microbatches a replica: {pieces}")
    if split := [axis for axis in plan.data_axes if getattr(plan.mesh, axis) > 1]:
        lines.append(
            f"batch             split in {plan.replicas} over {'+'.join(split)}; gradients are sums over all rows"
        )
        lines += [f"zero={plan.zero}            {ZERO[plan.zero]}"] if plan.zero else []
    for first in sorted(set(plan.aliases.values())):
        names = [alias for alias, canonical in plan.aliases.items() if canonical == first]
        lines.append(f"tied              {first} = {' = '.join(names)}")
    for each in plan.maps:
        acts = sum(spec.trainable and each.acts_on(path) for path, spec in plan.specs.items())
        lines.append(f"own map           {each.name}, leaves: {acts}")
    return "\n".join(lines)


def _leaves(plan: Plan) -> str:
    notes: dict[str, int] = {}
    owed = [bucket for pp in range(plan.mesh.pp) for bucket in buckets(plan, plan.mesh.rank(pp=pp))]
    paid = {path: list(_reduced(plan, bucket, path)) for bucket in owed for path in bucket.paths}
    rows: dict[tuple[str, ...], list[str]] = {}
    for path, spec in plan.specs.items():
        columns = (
            str(spec),
            " ".join(map(str, spec.local_shape(plan.mesh))),
            " ".join(map(str, plan.readers[path])),
            " ".join(_owed(plan, spec, notes)) or ("nothing" if spec.trainable else "frozen"),
            "; ".join([*_own_payers(plan, spec), *paid.get(path, ())]) or "-",
        )
        rows.setdefault(columns, []).append(path)
    head = ("leaf", "spec", "local shape", "stages", "owes [why]", "paid by, bytes")
    body = [(name, *columns) for columns, paths in rows.items() for name in braces(paths)]
    why = "\n".join(f"[{number}] {note}" for note, number in notes.items())
    return table([head, *body]) + ("\n\n" + why if why else "")


def _owed(plan: Plan, spec: Spec, notes: dict[str, int]) -> Iterable[str]:
    """The axes owed, those with the same origin together, each with the number of its note."""
    origins: dict[tuple[str, str], list[Debt]] = {}
    for debt in spec.owes:
        if getattr(plan.mesh, debt.axis) > 1:
            origins.setdefault((debt.place, "" if debt.place else debt.reason), []).append(debt)
    for (place, reason), debts in origins.items():
        axes = ", ".join(debt.axis for debt in debts)
        note = f"{axes}: meets data that differ along {axes} at {place}" if place else f"{axes}: {reason}"
        yield " ".join(debt.axis for debt in debts) + f"[{notes.setdefault(note, len(notes) + 1)}]"


def _own_payers(plan: Plan, spec: Spec) -> Iterable[str]:
    """The user's maps that pay, each with the axes that it sums over."""
    paid: dict[str, list[str]] = {}
    for debt in spec.owes:
        if debt.payer and getattr(plan.mesh, debt.axis) > 1:
            paid.setdefault(debt.payer, []).append(debt.axis)
    return (f"{payer} {'+'.join(axes)}" for payer, axes in paid.items())


def _reduced(plan: Plan, bucket: Bucket, path: str) -> Iterable[str]:
    """The step's own reduction of a leaf, if there is one."""
    if len(bucket.ranks) > 1:
        number = prod(plan.specs[path].local_shape(plan.mesh)) * _width(plan)
        yield f"{_kind(bucket)} {bucket.label}, {size(number)}"
    start = next(start for other, _, start in bucket.places() if other == path)
    for rest in bucket.rest:
        if rest.start <= start < rest.stop:
            yield f"then all_reduce {'+'.join(rest.axes)} of the slice"


def _width(plan: Plan) -> int:
    """Bytes of one element of a gradient that travels."""
    return precision_of(plan).reduce.itemsize


def _kind(bucket: Bucket) -> str:
    return "reduce_scatter" if bucket.sliced else "all_reduce"


def _buckets(plan: Plan) -> str:
    """Where each layer has its own, buckets that differ in their leaves alone are counted in one row."""
    found: dict[tuple[object, ...], dict[tuple[str, ...], list[Bucket]]] = {}
    for rank in range(plan.mesh.size):
        for bucket in buckets(plan, rank):
            if len(bucket.ranks) > 1 and bucket.ranks[0] == rank:
                kind = bucket.label, len(bucket.paths), bucket.elements, () if plan.zero > 1 else bucket.paths
                found.setdefault(kind, {}).setdefault(bucket.paths, []).append(bucket)
    if not found:
        return "no gradient is reduced"
    last = ["a rank's part", "groups of ranks"] if plan.zero else ["one all_reduce a step in each group of ranks"]
    rows: list[tuple[str, ...]] = [("gradient bucket", "leaves", "bytes", *last)]
    for alike in found.values():
        first = next(iter(alike.values()))[0]
        sets = list(dict.fromkeys(bucket.ranks for group in alike.values() for bucket in group))
        shown = "  ".join("{" + ranges(ranks) + "}" for ranks in sets[:8]) + ("  ..." if len(sets) > 8 else "")
        name = f"{_kind(first)} {first.label}" if plan.zero else first.label
        name = f"{name}, {len(alike)} times" if len(alike) > 1 else name
        part = [size(first.part * _width(plan))] if plan.zero else []
        rows.append((name, str(len(first.paths)), size(first.elements * _width(plan)), *part, shown))
    return table(rows)
