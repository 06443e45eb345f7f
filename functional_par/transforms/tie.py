"""``tie``: one leaf read in two places. The map copies the leaf to its owners; the transpose sums over them.

A tie is data: the tied names become one leaf of the model, with one spec. Owners on one stage share one tensor. Owners on
several stages hold a copy each, drawn from the same key, and the leaf owes ``pp``: the sum over the owners is one
collective with everything else that the leaf owes, so the copies stay equal bit for bit. The gradient norm counts the leaf
once, on its first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from functional_par.errors import CompositionError
from functional_par.mesh import DATA_AXES
from functional_par.model import Model
from functional_par.plan import Plan
from functional_par.transforms.base import Transform

Owner = str | tuple[str, Sequence[int]]


@dataclass(frozen=True)
class Tie(Transform):
    """See ``tie``."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...] | None, ...]

    repeatable: ClassVar[bool] = True

    def __call__(self, plan: Plan) -> Plan:
        leaves = plan.source.leaves
        for name in self.names:
            if name not in leaves:
                raise CompositionError(f"tie({_quoted(self.names)}): no leaf {name!r}. Leaves: {', '.join(leaves)}.")
        _check_alike(plan.source, self.names)
        classes = _merge([*_classes(plan), set(self.names)])
        order = _first_reads(plan.source)
        aliases: dict[str, str] = {}
        for tied in classes:
            first, *others = sorted(tied, key=lambda path: order[path])
            aliases |= dict.fromkeys(others, first)
        model = plan.source.rename(aliases)
        specs = {path: spec for path, spec in plan.specs.items() if path not in aliases}
        return replace(plan, model=model, specs=specs, aliases=aliases)

    def check(self, plan: Plan) -> None:
        """Every owner that was named by rank lies in one data-parallel replica, on a stage that reads its leaf.

        The mesh of ones is the reference of every mesh, whose ranks it does not have.
        """
        if plan.mesh.size == 1:
            return
        replicas: dict[tuple[int, ...], int] = {}
        for name, ranks in zip(self.names, self.ranks, strict=True):
            for rank in ranks or ():
                coords = plan.mesh.coords(rank)
                replicas.setdefault(tuple(getattr(coords, axis) for axis in DATA_AXES), rank)
                reads = {plan.stage_of[layer.name] for layer in plan.source.all_layers if name in layer.paths}
                if coords.pp not in {plan.placement[stage] for stage in reads}:
                    raise CompositionError(
                        f"tie: {name} is named on rank {rank}, which runs stage "
                        f"{', '.join(map(str, plan.stages_on(coords.pp)))} of {plan.mesh}, but it is read on stage "
                        f"{', '.join(map(str, sorted(reads)))}. Name ranks of that stage, or leave ranks out."
                    )
        if len(replicas) > 1:
            a, b = list(replicas.values())[:2]
            raise CompositionError(
                f"tie({_quoted(self.names)}): ranks {a} and {b} lie in different data-parallel replicas of {plan.mesh}. "
                "Replicas are kept equal by dp_reduce; a tie joins owners inside one replica."
            )


def tie(*owners: Owner, reduce: str = "sum") -> Tie:
    """Make several leaves one.

    Args:
        owners: dotted names, or ``(name, ranks)`` pairs whose ranks are checked against the mesh. The leaf that an earlier
            layer reads stands for all; its initial value is used.
        reduce: only ``"sum"``: the gradient of a leaf that is read in several places is the sum over the places.

    Raises:
        CompositionError: unknown names, leaves of different shapes, dims or trainability, owners in different replicas.

    >>> tie("head.weight", "embed.weight").names
    ('head.weight', 'embed.weight')
    """
    if reduce != "sum":
        raise CompositionError(
            f"tie(reduce={reduce!r}): only 'sum' is right, since the derivative of a function that reads a leaf twice is the "
            "sum of both; a mean would train the leaf with a smaller gradient than the untied function's."
        )
    pairs = [_owner(owner) for owner in owners]
    names = tuple(name for name, _ in pairs)
    if len(set(names)) < 2:
        raise CompositionError(f"tie({_quoted(names)}): a tie joins at least two different leaves.")
    return Tie(names, tuple(ranks for _, ranks in pairs))


def _owner(owner: Any) -> tuple[str, tuple[int, ...] | None]:
    """A name and, if it came in a pair, its ranks."""
    if isinstance(owner, str):
        return owner, None
    name, ranks = owner if isinstance(owner, tuple) and len(owner) == 2 else (None, None)
    if not isinstance(name, str) or not isinstance(ranks, Sequence) or not all(isinstance(r, int) for r in ranks):
        raise CompositionError(
            f"tie({owner!r}): an owner is a dotted name, or a pair (name, ranks) with a list of ranks."
        )
    return name, tuple(ranks)


def _check_alike(model: Model, names: tuple[str, ...]) -> None:
    first = model.leaves[names[0]]
    for name in names[1:]:
        other = model.leaves[name]
        for what, a, b in (
            ("shape", first.shape, other.shape),
            ("dims", first.dims, other.dims),
            ("trainable", first.trainable, other.trainable),
        ):
            if a != b:
                raise CompositionError(
                    f"tie({_quoted(names)}): {names[0]} has {what} {a!r}, but {name} has {b!r}. Tied leaves are one leaf: "
                    "give both the same shape and dims (transpose at the use, not in the parameter)."
                )


def _classes(plan: Plan) -> list[set[str]]:
    return [{first, *(a for a, c in plan.aliases.items() if c == first)} for first in set(plan.aliases.values())]


def _merge(classes: list[set[str]]) -> list[set[str]]:
    """Join sets that share a member."""
    merged: list[set[str]] = []
    for members in classes:
        touching = [other for other in merged if other & members]
        merged = [other for other in merged if not other & members] + [members.union(*touching)]
    return merged


def _first_reads(model: Model) -> dict[str, int]:
    order: dict[str, int] = {}
    for layer in model.all_layers:
        for path in layer.paths:
            order.setdefault(path, len(order))
    return order


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))
