"""Where the backward goes wrong though the forward is right: the last layer whose own cotangents nothing explains, and in it
the kernel or the ``autograd.Function`` that makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.audit import advice
from functional_par.audit.finding import Finding
from functional_par.audit.forward import make_finding
from functional_par.audit.layout import Grid, close, distance, find
from functional_par.audit.numbers import another_order, factor_of, joins, largest_difference
from functional_par.audit.observe import Case, Ranks, Single, values
from functional_par.audit.record import Call, LayerLog
from functional_par.audit.rules import Said, factor_said
from functional_par.trace import Abstract

Logs = Sequence[Sequence[LayerLog]]

Wrong = tuple[str, Tensor, Grid, bool]
"""A cotangent: what it belongs to, its true value, the ranks' values, and whether they have to be the same along tp."""


def first_wrong(case: Case, single: Single, ranks: Ranks) -> tuple[str, list[Wrong]] | None:
    """The last layer with a wrong cotangent: the first that the backward runs through."""
    for layer in reversed(case.plan.model.all_layers):
        if wrong := list(wrong_cotangents(case, single, ranks, layer.name)):
            return layer.name, wrong
    return None


def wrong_cotangents(case: Case, single: Single, ranks: Ranks, layer: str) -> Iterator[Wrong]:
    """Cotangents of a layer's parameters and inputs that are not those of the single process."""
    whole, logs = single.logs[layer], ranks.logs[layer]
    for path in sorted(set(whole.params) | {p for parts in logs for log in parts for p in log.params}):
        spec = case.plan.specs[path]
        owes = any(debt.axis == "tp" for debt in spec.owes)
        yield from _wrong(path, whole, logs, "params", path, same="tp" not in spec.sharded and not owes)
    same = _same_inputs(case, layer)
    for i in sorted(whole.inputs):
        yield from _wrong("the layer's input", whole, logs, "inputs", i, same=same.get(i, False))


def _wrong(
    name: str, whole: LayerLog, logs: tuple[tuple[LayerLog, ...], ...], what: str, key: int | str, same: bool
) -> Iterator[Wrong]:
    grid = values(logs, what, key)
    truth = getattr(whole, what).get(key)
    if truth is None and grid is not None:
        truth = _whole_zeros(grid)
    if truth is None:
        return
    if grid is None:
        grid = [[truth.new_zeros(truth.shape) for _ in parts] for parts in logs]
    if find(truth, grid, tp="same" if same else None) is None:
        yield name, truth, grid, same


def _whole_zeros(grid: Grid) -> Tensor:
    return grid[0][0].new_zeros(grid[0][0].shape)


def _same_inputs(case: Case, layer: str) -> dict[int, bool]:
    """Position of each leaf of a layer's input to whether it is the same along tp, by the trace."""
    traced, names = case.plan.trace(), [each.name for each in case.plan.model.all_layers]
    at = names.index(layer)
    if at == 0:
        return {}
    leaves = pytree.tree_leaves(traced.layers[names[at - 1]].output)
    return {i: isinstance(leaf, Abstract) and "tp" not in leaf.value.axes for i, leaf in enumerate(leaves)}


def diagnose(case: Case, single: Single, by_definition: Ranks, fast: Ranks, layer: str, wrong: list[Wrong]) -> Finding:
    """Say what is wrong in a layer that was recorded in full, on the ranks also with its kernels by definition."""
    name, truth, grid, same = wrong[0]
    said = classify(case, truth, grid, same, f"The cotangent of {name} is")
    place, what = "", name if name in case.plan.specs else "cotangent"
    if (kernel := kernel_at_fault(by_definition.logs[layer], fast.logs[layer], backward=True)) is not None:
        text = f"The fast form of a kernel has another backward than its definition: {lower(said.text)}"
        said = Said("kernel", text, advice.KERNEL, said.axis, said.ratio)
        place = str(kernel[0].place)
    elif (call := function_at_fault(single.logs[layer], by_definition.logs[layer], same)) is not None:
        said = Said(
            said.kind, f"In the backward of {call.name}: {lower(said.text)}", said.advice, said.axis, said.ratio
        )
        place = str(call.place)
    return make_finding(case, layer, said, largest_difference(truth, grid, same), place, what)


def classify(case: Case, truth: Tensor, grid: Grid, same: bool, who: str) -> Said:
    """Which kind of wrong a cotangent is."""
    n = case.plan.mesh.tp
    alike = any(True for _ in joins(truth, grid, tp="same"))
    if same and not alike and any(close(joined, truth, grid) for _, joined in joins(truth, grid, tp="sum")):
        text = f"{who} on each rank of tp just its own part: the sum over the ranks is missing."
        return Said("sum missing", text, advice.SUM_MISSING.format(axis="tp"), "tp")
    factor = factor_of(truth, grid)
    if factor is not None and abs(factor - 1) > 1e-6:
        return factor_said(case, factor, who)
    if n > 1 and not any(part.any() for parts in grid for part in parts[1:]) and truth.any():
        return Said(
            "sum missing", f"{who} zero on all ranks of tp but the first.", advice.SUM_MISSING.format(axis="tp"), "tp"
        )
    if another_order(truth, grid):
        return Said("another order", f"{who} the right numbers in another order.", advice.ORDER, "tp")
    if not truth.any():
        return Said("differs", f"{who} not zero, though it should be.", advice.DIFFERS)
    return Said("differs", f"{who} not that of one process, and no factor, sum or order explains it.", advice.DIFFERS)


def kernel_at_fault(definition: Logs, fast: Logs, backward: bool) -> tuple[Call, float] | None:
    """The kernel whose fast form differs from its definition though it was given the same, and by how much: the first in the
    forward, the last in the backward, which begins there."""
    pairs = [(d, f) for ds, fs in zip(definition, fast, strict=True) for d, f in zip(ds, fs, strict=True)]
    kernels = [list(zip(d.kernels, f.kernels, strict=False)) for d, f in pairs]
    count = min(map(len, kernels), default=0)
    for i in reversed(range(count)) if backward else range(count):
        far = max(_distance(*calls[i], backward) for calls in kernels)
        if far:
            return kernels[0][i][1], far
    return None


def _distance(definition: Call, fast: Call, backward: bool) -> float:
    """Largest difference of the values, or of the cotangents of the inputs; zero if it is none."""
    if not backward:
        pairs = list(zip(definition.values, fast.values, strict=False))
    else:
        a, b = definition.into, fast.into
        pairs = [(a.get(k, torch.zeros(())), b.get(k, torch.zeros(()))) for k in sorted(set(a) | set(b))]
    pairs = [(x.expand_as(y) if not x.ndim else x, y.expand_as(x) if not y.ndim else y) for x, y in pairs]
    return max((distance(y, x) for x, y in pairs if x.shape == y.shape and not close(y, x)), default=0.0)


def function_at_fault(single: LayerLog, logs: Logs, same: bool) -> Call | None:
    """The last Function that turns right cotangents into wrong ones; the last of all where only a sum is missing."""
    last = None
    for i, call in reversed(list(enumerate(single.functions))):
        calls = [[log.functions[i] if i < len(log.functions) else None for log in parts] for parts in logs]
        last = last or call
        if not _explained(call.into, calls, "into") and _explained(call.out, calls, "out"):
            return call
    return last


def _explained(truth: dict[int, Tensor], calls: list[list[Call | None]], what: str) -> bool:
    for key, whole in truth.items():
        grid = [[getattr(c, what).get(key) if c is not None else None for c in parts] for parts in calls]
        known = [[x for x in parts if x is not None] for parts in grid]
        if any(len(k) < len(g) for k, g in zip(known, grid, strict=True)) or find(whole, known) is None:
            return False
    return True


def lower(text: str) -> str:
    return text[:1].lower() + text[1:]
