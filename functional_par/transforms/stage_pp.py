"""``stage_pp``: each pipeline rank keeps the leaves of the layers of its own stages. Nothing is reduced, except what a tie
across ranks owes. At run time ``functional_par.pipeline`` runs the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from functional_par.errors import CompositionError
from functional_par.model import LOSS
from functional_par.pipeline.schedule import Schedule
from functional_par.pipeline.schedule_file import read_schedule
from functional_par.pipeline.schedules import canonical, chunks_of, make_schedule
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
    split: tuple[int, ...] | None
    chunks: int | None

    def __call__(self, plan: Plan) -> Plan:
        schedule, placement, given = self._schedule(plan.mesh.pp)
        names = [layer.name for layer in plan.source.layers]
        by_hand = self.split is not None and plan.mesh.pp > 1
        sizes = self.split if self.split and by_hand else split_by_cost(_costs(plan, names), len(placement))
        if len(sizes) != len(placement) or sum(sizes) != len(names):
            raise CompositionError(
                f"stage_pp(split={list(sizes)}): {len(sizes)} stages with {sum(sizes)} layers in all, but {plan.mesh} has "
                f"pp={plan.mesh.pp} with {len(placement)} stages under {schedule}, and the model has {len(names)} layers "
                f"({', '.join(names)}). Give a number of layers for each stage, {len(names)} in all."
            )
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        stages = tuple(tuple(names[a:b]) for a, b in pairwise(bounds))
        return replace(
            plan,
            stages=stages,
            placement=placement,
            schedule=schedule,
            microbatches=self.microbatches,
            given=given,
        ).use("pp")

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
        verify(given, microbatches=self.microbatches)
        return given.name, given.placement, given

    def _made(self, maker: Maker, ranks: int) -> Schedule:
        """What the user's function makes."""
        name = getattr(maker, "__name__", type(maker).__name__)
        made = maker(ranks, self.microbatches)
        if isinstance(made, Schedule):
            return made
        try:
            return Schedule.of(name, made)
        except (TypeError, ValueError) as error:
            raise CompositionError(
                f"stage_pp(schedule={name}): it returned {type(made).__name__}, which is no fp.Schedule and no list of rows of "
                f"actions ({error}). Return a list with one list of actions a rank, such as [['0F0', '0B0'], ['1F0', '1B0']]."
            ) from error


def stage_pp(
    schedule: str | Schedule | Maker = "1f1b",
    microbatches: int = 1,
    split: Sequence[int] | None = None,
    chunks: int | None = None,
) -> StagePP:
    """Cut the list of layers into pipeline stages.

    Args:
        schedule: a name (``afab``, ``1f1b``, ``interleaved``, ``zb-h1``, ``zbv``, ... and what nanotron and torch call them),
            or one of your own: a path to a CSV file as torch's pipelining writes them, an ``fp.Schedule``, or a function of
            (ranks, microbatches) that returns one. It is proved before it runs. On a mesh with pp=1 a schedule of your own
            that is for more ranks is replaced by plain accumulation.
        microbatches: how many pieces each replica's share of the batch is cut into; any number of at least 1, also fewer
            than there are stages. With one stage this is gradient accumulation.
        split: how many layers each stage gets, embedding and head included; by default the split whose slowest stage is
            fastest, by counted operations. Used when pp > 1.
        chunks: stages on each rank, for schedules that have several (``interleaved``: 2 if left out).

    Raises:
        CompositionError: fewer than one microbatch, more stages than layers, or a split that does not fit the model.
        ScheduleError: an unknown schedule, chunks that it does not have, or one of your own that cannot run.
    """
    if isinstance(schedule, str) and schedule.endswith(".csv"):
        schedule = read_schedule(schedule)
    if isinstance(schedule, str):
        schedule = canonical(schedule)
        chunks_of(schedule, chunks)
    elif not isinstance(schedule, Schedule) and not callable(schedule):
        raise CompositionError(
            f"stage_pp(schedule={schedule!r}): a name, a path to a CSV file, an fp.Schedule, or a function of (ranks, "
            "microbatches) that returns one."
        )
    elif chunks is not None:
        raise CompositionError(
            f"stage_pp(chunks={chunks!r}): a schedule of your own has the stages that its actions name."
        )
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise CompositionError(f"stage_pp(microbatches={microbatches!r}): it is an integer of at least 1.")
    if split is not None and not isinstance(split, Sequence):
        raise CompositionError(f"stage_pp(split={split!r}): it is a list with the number of layers of each stage.")
    if split is not None and any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in split):
        raise CompositionError(
            f"stage_pp(split={list(split)}): each stage gets an integer number of layers, at least 1."
        )
    return StagePP(schedule, microbatches, None if split is None else tuple(split), chunks)


def split_by_cost(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Number of consecutive layers for each stage such that the most expensive stage is cheapest; at least one a stage.

    Exact, by dynamic programming over (stages, layers). Among equal splits the first stages get fewer layers.

    >>> split_by_cost([0, 4, 4, 4, 4, 3], 2)
    (3, 3)
    """
    n = len(costs)
    if stages > n:
        raise CompositionError(
            f"{stages} pipeline stages, but the model has only {n} layers. Use a pp (times chunks) of at most {n}."
        )
    before = [sum(costs[:i]) for i in range(n + 1)]
    best: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {(0, 0): (0, ())}
    for stage in range(1, stages + 1):
        for end in range(stage, n - (stages - stage) + 1):
            best[stage, end] = min(
                (max(best[stage - 1, start][0], before[end] - before[start]), (*best[stage - 1, start][1], end - start))
                for start in range(stage - 1, end)
                if (stage - 1, start) in best
            )
    return best[stages, n][1]


def _costs(plan: Plan, names: list[str]) -> list[int]:
    """Cost of each layer, the loss counted with the last."""
    costs: Mapping[str, int] = plan.costs
    return [costs.get(name, 0) + (costs.get(LOSS, 0) if name == names[-1] else 0) for name in names]
