"""``explain``: a plan as text for a design review. What lies where, what each gradient owes and why, who pays, how much."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from functional_par.plan import Plan
from functional_par.reduce import Bucket, buckets
from functional_par.report.memory import held_by
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
        parts = [_header(self.plan), _stages(self.plan), _leaves(self.plan), _buckets(self.plan)]
        return "\n\n".join(part for part in parts if part)


def explain(plan: Plan) -> Explanation:
    """Explain a finished plan."""
    return Explanation(plan)


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


def _read(plan: Plan, stage: int) -> int:
    return sum(prod(plan.specs[path].local_shape(plan.mesh)) for path in plan.stage_leaves(stage))


def _stages(plan: Plan) -> str:
    total = sum(plan.costs.values()) or 1
    rows = [("stage", "layers", "parameters a rank", "work", "ranks")]
    for stage, names in enumerate(plan.stages):
        work = sum(cost for name, cost in plan.costs.items() if plan.stage_of[name] == stage)
        members = [rank for rank in range(plan.mesh.size) if plan.mesh.coords(rank).pp == plan.placement[stage]]
        rows.append(
            (str(stage), collapse(names), f"{_read(plan, stage):,}", f"{100 * work / total:.0f}%", ranges(members))
        )
    return table(rows)


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
        rows.append((label, str(len(paths)), size(group[0].elements(plan) * BYTES), sets))
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns with a line under the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def collapse(names: Iterable[str]) -> str:
    """Names that differ in their first number alone, as one.

    >>> collapse(["embed", "block0", "block1", "block2"])
    'embed block0-2'
    """
    grouped: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = re.match(r"(\D*)(\d+)(.*)", name)
        before, number, after = match.groups() if match else (name, "-1", "")
        grouped.setdefault((before, after), []).append(int(number))
    return " ".join(f"{a}{ranges(n) if n[0] >= 0 else ''}{b}" for (a, b), n in grouped.items())


def braces(paths: Sequence[str]) -> list[str]:
    """Dotted paths with those that differ in one component alone as one, the last components first.

    >>> braces(["blocks.0.attn.q", "blocks.0.attn.k", "blocks.1.attn.q", "blocks.1.attn.k", "norm"])
    ['blocks.0-1.attn.{q,k}', 'norm']
    """
    split = [tuple(path.split(".")) for path in paths]
    for place in range(max(map(len, split))):
        merged: dict[tuple[str, ...], list[str]] = {}
        for parts in split:
            at = len(parts) - 1 - place
            key = (*parts[:at], "", *parts[at + 1 :]) if at >= 0 else parts
            merged.setdefault(key, []).append(parts[at] if at >= 0 else "")
        split = [tuple(part or _either(options) for part in key) for key, options in merged.items()]
    return [".".join(parts) for parts in split]


def _either(options: Sequence[str]) -> str:
    if len(options) == 1:
        return options[0]
    if all(option.isdigit() for option in options):
        return ranges([int(option) for option in options])
    return "{" + ",".join(options) + "}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers with runs written as ranges.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def size(number: int) -> str:
    """Bytes for people, in powers of 1000.

    >>> size(4096), size(134_000_000)
    ('4.1 kB', '134.0 MB')
    """
    if number < 1000:
        return f"{number} B"
    power = min(4, (len(str(number)) - 1) // 3)
    return f"{number / 1000**power:.1f} {'kMGT'[power - 1]}B"
