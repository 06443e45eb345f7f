"""Cuts the layers of a plan so that every rank has room for its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from functional_par.errors import CompositionError
from functional_par.model import LOSS
from functional_par.pipeline.kept import Kept, layers_kept, most_waiting
from functional_par.pipeline.memory import MemoryBound, held_bytes, live_microbatches, passing_bytes, rank_memory
from functional_par.pipeline.split import Need, best_split, gigabytes
from functional_par.pipeline.told import fields_of
from functional_par.plan import Plan
from functional_par.precision import Precision


def fitting_stages(plan: Plan, bound: MemoryBound, costs: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """The names of the layers of each stage: the best split whose ranks have room.

    What the stages of one rank keep is counted as if all were fullest at the same time, and a leaf that two of them read
    twice, unless the model's first layer reads it.

    Args:
        plan: with its placement and schedule, any stages of that number, and the sharding of every leaf.
        bound: what a rank has, and the shapes of a microbatch.
        costs: of each layer, the loss with the last.

    Raises:
        CompositionError: no split fits, or the shapes are not those of the model.
    """
    sizes = best_split(costs, plan.placement, _need(plan, bound), int(bound.bytes))
    names = [layer.name for layer in plan.model.layers]
    return tuple(tuple(names[a:b]) for a, b in pairwise((0, *accumulate(sizes))))


def check_fit(plan: Plan, bound: MemoryBound) -> None:
    """Raise CompositionError for a finished plan with a rank that has no room for its stages."""
    dtype = plan.precise(bound.dtype, "stage_pp(memory=...)").compute
    needs = rank_memory(plan, fields_of(plan.model, bound.batch or {}, dtype), dtype, bound.slots)
    pp, most = max(enumerate(needs), key=lambda entry: entry[1].total)
    if most.total > bound.bytes:
        stages = ", ".join(f"stage {s} ({' '.join(plan.stages[s])})" for s in plan.stages_on(pp))
        raise CompositionError(
            f"{plan.mesh}: the ranks at pp={pp} with {stages} need {gigabytes(most.total)}, of which activations "
            f"{gigabytes(most.activations)}, but have {gigabytes(int(bound.bytes))}. Leave split out, so that the layers are "
            "cut to fit, or give such a rank fewer layers."
        )


@dataclass(frozen=True)
class _Leaf:
    """One leaf: its bytes on a rank with gradient and state, and the layers that read it, in order."""

    size: int
    readers: tuple[int, ...]


def _need(plan: Plan, bound: MemoryBound) -> Need:
    """Bytes of a stage of some layers."""
    kinds = plan.precise(bound.dtype, "stage_pp(memory=...)")
    traced = plan.trace(fields_of(plan.model, bound.batch or {}, kinds.compute), kinds.compute).layers
    names = [layer.name for layer in plan.model.layers]
    layers = layers_kept(plan, traced, None)
    kept = [layers[name] for name in names]
    kept[-1] = Kept.of_stage([kept[-1], layers[LOSS]])
    leaves = _leaves(plan, kinds, bound.slots)
    single = [0] * len(names)
    for leaf in leaves:
        if len(leaf.readers) == 1:
            single[leaf.readers[0]] += leaf.size
    tied = [leaf for leaf in leaves if len(leaf.readers) > 1]
    saved, waits, held = (
        [0, *accumulate(each)] for each in ([k.forward for k in kept], [k.waiting for k in kept], single)
    )
    passing = passing_bytes(plan, range(len(plan.stages)), kinds)
    live, where = live_microbatches(plan.timetable), plan.placement
    waiting = [most_waiting(plan.timetable, stage) for stage in range(len(live))]
    peak = _Most([before + each.again for before, each in zip(saved[1:], kept, strict=True)])

    def need(stage: int, start: int, end: int) -> int:
        again = stage > 0 and where[stage] == where[0]
        shared = sum(
            leaf.size
            for leaf in tied
            if any(start <= at < end for at in leaf.readers) and not (again and leaf.readers[0] == 0)
        )
        forward, later = saved[end] - saved[start], waits[end] - waits[start]
        kept = live[stage] * forward + waiting[stage] * max(0, later - forward)
        return held[end] - held[start] + shared + passing + kept + max(0, peak.of(start, end) - saved[end])

    return need


class _Most:
    """The largest of any consecutive numbers, at once."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.tables = [list(numbers)]  # table k has the largest of 2**k numbers from each place on
        while (step := 1 << (len(self.tables) - 1)) * 2 <= len(numbers):
            last = self.tables[-1]
            self.tables.append([max(a, b) for a, b in zip(last, last[step:], strict=False)])

    def of(self, start: int, end: int) -> int:
        k = (end - start).bit_length() - 1
        return max(self.tables[k][start], self.tables[k][end - (1 << k)])


def _leaves(plan: Plan, kinds: Precision, slots: int) -> list[_Leaf]:
    last = len(plan.model.layers) - 1
    readers: dict[str, set[int]] = {path: set() for path in plan.specs}
    for i, layer in enumerate(plan.model.all_layers):
        for path in layer.paths:
            readers[path].add(min(i, last))
    return [_Leaf(sum(held_bytes(plan, [path], kinds, slots)), tuple(sorted(at))) for path, at in readers.items()]
