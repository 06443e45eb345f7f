"""``explain``: a plan as text for a design review. What lies where, what each gradient owes and why, who pays, how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from functional_par.bucket import Bucket
from functional_par.buckets import buckets
from functional_par.pipeline.told import Told, check_shapes, shapes_of
from functional_par.plan import Plan
from functional_par.report.memory import held_by
from functional_par.report.stages import stages
from functional_par.report.text import braces, ranges, size, table
from functional_par.spec import Debt, Spec

BYTES = 4
"""Bytes of one gradient element: gradients are accumulated and reduced in float32 (float64 runs double this)."""


@dataclass(frozen=True)
class Explanation:
    """A plan in words. ``print`` it.

    Attributes:
        plan: what is explained.
    """

    plan: Plan

    def __str__(self) -> str:
        parts = [_header(self.plan), stages(self.plan), _leaves(self.plan), _buckets(self.plan)]
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
    if "tp" in plan.active:
        lines.append(f"tensor parallel   {plan.mode.value}, async_comm={plan.async_comm}")
    if "pp" in plan.active:
        stages, pieces = len(plan.stages), plan.microbatches
        lines.append(f"pipeline          {plan.schedule}, stages: {stages}, microbatches a replica: {pieces}")
    if split := [axis for axis in plan.data_axes if getattr(plan.mesh, axis) > 1]:
        lines.append(
            f"batch             split in {plan.replicas} over {'+'.join(split)}; gradients are sums over all rows"
        )
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
    labels = {path: bucket.label for bucket in owed for path in bucket.paths}
    rows: dict[tuple[str, ...], list[str]] = {}
    for path, spec in plan.specs.items():
        columns = (
            str(spec),
            " ".join(map(str, spec.local_shape(plan.mesh))),
            " ".join(map(str, plan.readers[path])),
            " ".join(_owed(plan, spec, notes)) or ("nothing" if spec.trainable else "frozen"),
            "; ".join([*_own_payers(plan, spec), *_collective(plan, spec, labels.get(path, ""))]) or "-",
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


def _collective(plan: Plan, spec: Spec, label: str) -> Iterable[str]:
    """The step's own reduction, if there is one."""
    if label not in ("", "none"):
        yield f"all_reduce {label}, {size(prod(spec.local_shape(plan.mesh)) * BYTES)}"


def _buckets(plan: Plan) -> str:
    merged: dict[tuple[str, tuple[str, ...]], list[Bucket]] = {}
    for rank in range(plan.mesh.size):
        for bucket in buckets(plan, rank):
            if len(bucket.ranks) > 1 and bucket.ranks[0] == rank:
                merged.setdefault((bucket.label, bucket.paths), []).append(bucket)
    if not merged:
        return "no gradient is reduced"
    rows = [("gradient bucket", "leaves", "bytes", "one all_reduce a step in each group of ranks")]
    for (label, paths), group in merged.items():
        sets = "  ".join("{" + ranges(bucket.ranks) + "}" for bucket in group[:8]) + ("  ..." if len(group) > 8 else "")
        rows.append((label, str(len(paths)), size(group[0].elements * BYTES), sets))
    return table(rows)
