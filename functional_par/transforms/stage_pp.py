"""``stage_pp``: each pipeline stage keeps the leaves of its own layers. Nothing is reduced, except what a tie across
stages owes. At run time ``functional_par.pipeline`` runs the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from functional_par.errors import CompositionError
from functional_par.model import LOSS
from functional_par.pipeline.old_schedules import schedule_names
from functional_par.plan import Plan
from functional_par.transforms.base import Transform


@dataclass(frozen=True)
class StagePP(Transform):
    """See ``stage_pp``."""

    schedule: str
    microbatches: int
    split: tuple[int, ...] | None

    def __call__(self, plan: Plan) -> Plan:
        names = [layer.name for layer in plan.source.layers]
        sizes = self.split if self.split and plan.mesh.pp > 1 else split_by_cost(_costs(plan, names), plan.mesh.pp)
        if len(sizes) != plan.mesh.pp or sum(sizes) != len(names):
            raise CompositionError(
                f"stage_pp(split={list(sizes)}): {len(sizes)} stages with {sum(sizes)} layers in all, but {plan.mesh} has "
                f"pp={plan.mesh.pp} and the model has {len(names)} layers ({', '.join(names)}). Give "
                f"a number of layers for each stage, {len(names)} in all."
            )
        bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        stages = tuple(tuple(names[a:b]) for a, b in pairwise(bounds))
        return replace(plan, stages=stages, schedule=self.schedule, microbatches=self.microbatches).use("pp")


def stage_pp(schedule: str = "1f1b", microbatches: int = 1, split: Sequence[int] | None = None) -> StagePP:
    """Cut the list of layers into pipeline stages.

    Args:
        schedule: ``"1f1b"`` or ``"afab"``.
        microbatches: how many pieces each replica's share of the batch is cut into; any number of at least 1, also fewer
            than there are stages. With one stage this is gradient accumulation.
        split: how many layers each stage gets, embedding and head included; by default the split whose slowest stage is
            fastest, by counted operations. Used when pp > 1.

    Raises:
        CompositionError: an unknown schedule, fewer than one microbatch, more stages than layers, or a split that does not
            fit the model.
    """
    if schedule not in schedule_names():
        raise CompositionError(f"stage_pp(schedule={schedule!r}): it is one of {', '.join(schedule_names())}.")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise CompositionError(f"stage_pp(microbatches={microbatches!r}): it is an integer of at least 1.")
    if split is not None and not isinstance(split, Sequence):
        raise CompositionError(f"stage_pp(split={split!r}): it is a list with the number of layers of each stage.")
    if split is not None and any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in split):
        raise CompositionError(
            f"stage_pp(split={list(split)}): each stage gets an integer number of layers, at least 1."
        )
    return StagePP(schedule, microbatches, None if split is None else tuple(split))


def split_by_cost(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Number of consecutive layers for each stage such that the most expensive stage is cheapest; at least one a stage.

    Exact, by dynamic programming over (stages, layers). Among equal splits the first stages get fewer layers.

    >>> split_by_cost([0, 4, 4, 4, 4, 3], 2)
    (3, 3)
    """
    n = len(costs)
    if stages > n:
        raise CompositionError(f"pp={stages} stages, but the model has only {n} layers. Use a pp of at most {n}.")
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
