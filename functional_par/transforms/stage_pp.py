"""``stage_pp``: each pipeline rank keeps the leaves of the layers of its own stages. Nothing is reduced, except what a tie
across ranks owes. At run time ``functional_par.pipeline`` runs the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from itertools import accumulate, pairwise
from math import isfinite
from os import PathLike
from typing import Any

from functional_par.errors import CompositionError
from functional_par.model import LOSS
from functional_par.pipeline.by_hand import Split, check_form, sizes_of
from functional_par.pipeline.fit import check_fit, fitting_stages
from functional_par.pipeline.layer_costs import LayerCosts
from functional_par.pipeline.memory import MemoryBound
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.schedule_file import read_schedule
from functional_par.pipeline.schedules import canonical, chunks_of, make_schedule
from functional_par.pipeline.split import best_split, whole_numbers
from functional_par.pipeline.told import SLOTS, Told, check_shapes, declared, shapes_of
from functional_par.pipeline.verify import verify
from functional_par.plan import Plan
from functional_par.transforms.base import Transform

Maker = Callable[[int, int], Any]
"""``(ranks, microbatches)`` to a ``Schedule``, or to rows of actions or of their text."""


@dataclass(frozen=True)
class StagePP(Transform):
    """See ``stage_pp``."""

    schedule: str | Schedule | Maker
    microbatches: int
    split: tuple[int, ...] | tuple[tuple[str, ...], ...] | None
    chunks: int | None
    costs: Mapping[str, float] | None = None
    memory: MemoryBound | None = None
    measured: Told | None = None
    parts: Mapping[str, tuple[float, float, float]] | None = None

    def __call__(self, plan: Plan) -> Plan:
        schedule, placement, given = self._schedule(plan.mesh.pp)
        if self.costs is not None:
            plan = replace(plan, costs=_checked(self.costs, plan), parts=self.parts or {})
        names = [layer.name for layer in plan.source.layers]
        if self._by_hand(plan):
            asked = f"{plan.mesh} has pp={plan.mesh.pp} with {len(placement)} stages under {schedule}"
            sizes = sizes_of(self.split or (), names, len(placement), asked)
        else:
            sizes = best_split(_costs(plan, names), placement)
        stages = tuple(tuple(names[a:b]) for a, b in pairwise((0, *accumulate(sizes))))
        return replace(
            plan,
            stages=stages,
            placement=placement,
            schedule=schedule,
            microbatches=self.microbatches,
            given=given,
            told=self._told(plan),
            cut=self._cut(plan),
        ).use("pp")

    def check(self, plan: Plan) -> None:
        """Every rank has room for its stages."""
        bound = self._bound(plan)
        if bound is not None and plan.mesh.pp > 1:
            check_fit(plan, bound)

    def _bound(self, plan: Plan) -> MemoryBound | None:
        """The bound, which knows the shapes of a microbatch."""
        if self.memory is None or self.memory.batch is not None:
            return self.memory
        return replace(self.memory, batch=declared(plan.source, self.memory.bytes))

    def _told(self, plan: Plan) -> Told | None:
        """The shapes by which memory is counted, those of the bound first."""
        bound, told, asked = self._bound(plan), self.measured, "stage_pp(costs=...)"
        if bound is not None:
            told, asked = Told(shapes_of(bound.batch or {}), bound.dtype, bound.slots), "MemoryBound(batch=...)"
        if told is not None:
            check_shapes(plan.source, told.batch, asked)
        return told

    def _by_hand(self, plan: Plan) -> bool:
        return self.split is not None and plan.mesh.pp > 1

    def _cut(self, plan: Plan) -> Callable[[Plan], tuple[tuple[str, ...], ...]] | None:
        """What makes the stages once the sharding of every leaf is known, if they depend on it."""
        bound = self._bound(plan)
        if bound is None or self._by_hand(plan) or plan.mesh.pp == 1:
            return None
        return lambda whole: fitting_stages(whole, bound, _costs(whole, [layer.name for layer in whole.source.layers]))

    def _schedule(self, ranks: int) -> tuple[str, tuple[int, ...], Schedule | None]:
        """Name and placement of the stages, and the user's own schedule if it is one."""
        if isinstance(self.schedule, str):
            made = make_schedule(self.schedule, ranks, 1, self.chunks)
            return made.name, made.placement, None
        if ranks == 1 and not (isinstance(self.schedule, Schedule) and self.schedule.ranks == 1):
            return "1f1b", (0,), None
        given = self.schedule if isinstance(self.schedule, Schedule) else self._made(self.schedule, ranks)
        if given.ranks != ranks:
            raise CompositionError(
                f"stage_pp(schedule={given.name!r}): it is a schedule of {given.ranks} ranks, but pp={ranks}. Give one with "
                "a row for each rank of pp, or a function of (ranks, microbatches) that makes one for any number."
            )
        if given.microbatches != self.microbatches:
            raise CompositionError(
                f"stage_pp(schedule={given.name!r}): it is a schedule of {given.microbatches} microbatches, but "
                f"microbatches={self.microbatches}. Make them equal, or give a function of (ranks, microbatches) that makes a "
                "schedule of any number."
            )
        verify(given, microbatches=self.microbatches)
        return given.name, given.placement, given

    def _made(self, maker: Maker, ranks: int) -> Schedule:
        """What the user's function makes."""
        name = getattr(maker, "__name__", type(maker).__name__)
        _check_takes(maker, name, ranks, self.microbatches)
        made = maker(ranks, self.microbatches)
        if isinstance(made, Schedule):
            return made
        if isinstance(made, str) or not isinstance(made, Iterable):
            raise CompositionError(
                f"stage_pp(schedule={name}): it returned {type(made).__name__}, which is no fp.pipeline.Schedule and no "
                "list of rows of actions. Return a list with one list of actions a rank, such as "
                "[['0F0', '0B0'], ['1F0', '1B0']]."
            )
        return Schedule.of(name, made)


def _check_takes(maker: Maker, name: str, *given: int) -> None:
    """A function takes what it is called with. What it raises itself stays what it is."""
    try:
        takes = signature(maker)
    except (TypeError, ValueError):  # a builtin that does not say
        return
    try:
        takes.bind(*given)
    except TypeError as error:
        raise CompositionError(
            f"stage_pp(schedule={name}): it is called with (ranks, microbatches), here {given}, but it is a function of "
            f"{takes}: {error}. Give one that takes both."
        ) from error


def stage_pp(
    schedule: str | PathLike[str] | Schedule | Maker | None = None,
    microbatches: int = 1,
    split: Split | None = None,
    chunks: int | None = None,
    costs: LayerCosts | Mapping[str, float] | None = None,
    memory: MemoryBound | float | None = None,
) -> StagePP:
    """Cut the list of layers into pipeline stages.

    Args:
        schedule: a name (``afab``, ``1f1b``, ``interleaved``, ``zb-h1``, ``zbv``, ... and what nanotron and torch call them).
            ``zb-1p`` and ``zb-2p`` are made for the costs of the stages: the first has the memory of 1F1B, the second keeps up
            to ``2 pp - 1`` microbatches alive where that is faster. It is the default, or ``zb-1p`` if there is a bound of
            memory. Or one of your own: a path to a CSV file as torch's pipelining writes them, an ``fp.pipeline.Schedule``,
            or a function of (ranks, microbatches) that returns one or its rows. It is proved before it runs. On a mesh with
            pp=1 a schedule of your own that is for more ranks is replaced by plain accumulation.
        microbatches: how many pieces each replica's share of the batch is cut into; any number of at least 1, also fewer
            than there are stages. With one stage this is gradient accumulation.
        split: the layers of each stage, embedding and head included: their number (``[3, 2]``), or their names as ``explain``
            prints them (``["embed block0-1", "block2 head"]``); by default the split whose slowest rank is fastest by
            ``costs``. Used when pp > 1.
        chunks: stages on each rank, for schedules that have several (``interleaved``: 2 if left out).
        costs: work of each layer and of the loss, in any unit: from ``fp.measure``, or numbers by name; by default counted
            operations of the forward.
        memory: bytes that each rank has for its stages, with the shapes of a microbatch and the dtype that ``costs`` were
            measured with, or an ``fp.MemoryBound`` that says them and more. Splits that need more are not taken. Used when
            pp > 1.

    Every model trains right under every schedule. Where a backward is cut in two, the weights and biases that a layer passes,
    as they are, to ``fp.nn.column_linear``, ``fp.nn.row_linear``, ``fp.nn.embedding`` and what is made of these get their
    gradients in W. What a layer uses in other ways (``x @ w.T``, a weight that it has scaled or sliced first) gets them in I.

    Raises:
        CompositionError: fewer than one microbatch, more stages than layers, a split that does not fit the model, or a bound
            of memory where nothing says the shapes of a microbatch.
        ScheduleError: an unknown schedule, chunks that it does not have, or one of your own that cannot run.
    """
    schedule = ("zb-2p" if memory is None else "zb-1p") if schedule is None else schedule
    if isinstance(schedule, PathLike) or (isinstance(schedule, str) and schedule.lower().endswith(".csv")):
        schedule = read_schedule(schedule)
    if isinstance(schedule, str):
        schedule = canonical(schedule)
        chunks_of(schedule, chunks)
    elif not isinstance(schedule, Schedule) and not callable(schedule):
        raise CompositionError(
            f"stage_pp(schedule={schedule!r}): a name, a path to a CSV file, an fp.pipeline.Schedule, or a function of (ranks, "
            "microbatches) that returns one."
        )
    elif chunks is not None:
        raise CompositionError(
            f"stage_pp(chunks={chunks!r}): a schedule of your own has the stages that its actions name."
        )
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise CompositionError(f"stage_pp(microbatches={microbatches!r}): it is an integer of at least 1.")
    split = None if split is None else check_form(split)
    measured = _measured(costs)
    parts = costs.parts if isinstance(costs, LayerCosts) else None
    costs = costs.total if isinstance(costs, LayerCosts) else costs
    return StagePP(schedule, microbatches, split, chunks, costs, _with_shapes(memory, measured), measured, parts)


def _measured(costs: LayerCosts | Mapping[str, float] | None) -> Told | None:
    """The microbatch that the costs were measured with, if they were."""
    if not isinstance(costs, LayerCosts) or costs.batch is None:
        return None
    return Told(costs.batch, costs.dtype, SLOTS)


def _with_shapes(memory: MemoryBound | float | None, measured: Told | None) -> MemoryBound | None:
    """The bound, with the measured microbatch if it names none; a number has its dtype too."""
    if memory is None:
        return None
    if not isinstance(memory, MemoryBound):
        memory = MemoryBound(memory, dtype=measured.dtype if measured else None)
    return memory if memory.batch is not None or measured is None else replace(memory, batch=measured.batch)


def _checked(costs: Mapping[str, float], plan: Plan) -> Mapping[str, float]:
    """The costs of all layers, in the model's order."""
    names = [layer.name for layer in plan.source.all_layers]
    if different := [name for name in (*names, *costs) if (name in costs) != (name in names)]:
        raise CompositionError(
            f"stage_pp(costs=...): costs are of the layers {', '.join(costs)}, but the model has {', '.join(names)}; they "
            f"differ in {', '.join(different)}. Give a number for each layer and for the loss."
        )
    for name, cost in costs.items():
        if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not isfinite(cost) or cost < 0:
            raise CompositionError(f"stage_pp(costs={{{name!r}: {cost!r}}}): a cost is a finite number of at least 0.")
    return {name: costs[name] for name in names}


def _costs(plan: Plan, names: list[str]) -> list[int]:
    """Cost of each layer in integers, the loss counted with the last."""
    costs: Mapping[str, float] = plan.costs
    return whole_numbers([costs.get(n, 0) + (costs.get(LOSS, 0) if n == names[-1] else 0) for n in names])
