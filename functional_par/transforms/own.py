"""Transforms of the user's own that act on gradients and updates. Each says in which phase of the step it acts, and is held
to what the gradient owes there: a map on local gradients is linear wherever it meets a partial sum, and pays what it sums;
the step reduces the rest. They run in the order in which they are composed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from functional_par.errors import CompositionError
from functional_par.maps.gradient_map import GradientMap, LeafFunction, Phase
from functional_par.plan import Plan
from functional_par.transforms.base import Transform


@dataclass(frozen=True)
class OwnMap(Transform):
    """See ``on_local_gradients``, ``on_reduced_gradients`` and ``on_updates``."""

    map: GradientMap

    repeatable: ClassVar[bool] = True

    def __call__(self, plan: Plan) -> Plan:
        if self.map.name in [other.name for other in plan.maps]:
            raise CompositionError(
                f"two maps of this program are called {self.map.name!r}. Name one, with name=..., so that messages and tables "
                "can tell them apart."
            )
        return replace(plan, maps=(*plan.maps, self.map))

    def check(self, plan: Plan) -> None:
        """Every pattern matches some leaf that has a gradient."""
        for pattern in self.map.leaves:
            if not any(replace(self.map, leaves=(pattern,)).acts_on(p) for p, s in plan.specs.items() if s.trainable):
                raise CompositionError(
                    f"{self.map.name}: no trainable leaf matches {pattern!r}. Leaves: {', '.join(plan.specs)}."
                    + (f" Tied names: {', '.join(plan.aliases)}." if plan.aliases else "")
                )


def on_local_gradients(function: LeafFunction, *leaves: str, name: str = "") -> OwnMap:
    """A map on the gradients of this rank's own rows, before any sum over ranks.

    A gradient is here still a partial sum over ``leaf.owes``, so the map has to be linear in it until it has summed itself,
    with ``leaf.psum``; what it sums is paid, and the step sums the rest. It runs on tensors without data when a plan is made.

    Args:
        function: ``(grad, leaf) -> grad``: this rank's shard, in the dtype of the accumulation (float32 or float64), to one
            of the same shape and dtype; ``leaf`` is a ``fp.Leaf``.
        leaves: patterns of dotted paths, as in ``fnmatch`` (``"blocks.*.mlp.*"``); by default all trainable leaves.
        name: for messages; by default the function's.

    Raises, when a plan is made:
        MissingCollective: an operation that is not linear on a partial sum, such as a clip.
        SuperfluousCollective: a sum over an axis that the gradient does not owe, or that was paid already.
    """
    return _own("local", function, leaves, name)


def on_reduced_gradients(function: LeafFunction, *leaves: str, name: str = "") -> OwnMap:
    """A map on the gradients after all sums, before the norm is taken and gradients are clipped. It may be any function, but
    for what depends on how a leaf is cut: a norm of a shard is refused, ``leaf.norm(grad)`` is that of the whole leaf.

    Arguments and errors as for ``on_local_gradients``.
    """
    return _own("reduced", function, leaves, name)


def on_updates(function: LeafFunction, *leaves: str, name: str = "") -> OwnMap:
    """A map on what the optimizer adds to each leaf, weight decay included; ``leaf.param`` is the leaf before.

    Arguments and errors as for ``on_local_gradients``.
    """
    return _own("update", function, leaves, name)


def _own(phase: Phase, function: Any, leaves: tuple[Any, ...], name: str) -> OwnMap:
    what = {"local": "on_local_gradients", "reduced": "on_reduced_gradients", "update": "on_updates"}[phase]
    if not callable(function):
        raise CompositionError(f"{what}({function!r}): it takes a function (grad, leaf) -> grad.")
    if wrong := [pattern for pattern in leaves if not isinstance(pattern, str)]:
        raise CompositionError(f"{what}(..., {wrong[0]!r}): leaves are named by patterns, such as 'blocks.*.mlp.*'.")
    called = name or getattr(function, "__name__", type(function).__name__)
    return OwnMap(GradientMap(f"{what}({called})", phase, function, leaves or ("*",)))
