"""The optimizer of a rank that has slices: it moves its own, and sends them round while it moves the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from functional_par.comm.base import AllGather, Handle, World
from functional_par.optim.base import Optimizer
from functional_par.plan import Plan
from functional_par.zero.parts import Part, parts

Flat = Mapping[str, Tensor]


def make_sliced(plan: Plan, world: World, optimizer: Optimizer, *, inplace: bool) -> Sliced | None:
    """What moves the slices of a rank; None where the plan has none."""
    trained = [part for part in parts(plan, world.rank) if plan.specs[part.bucket.paths[0]].trainable]
    return Sliced(world, optimizer, trained, gather=plan.zero < 3, inplace=inplace) if plan.zero else None


class Sliced:
    """Updates bucket by bucket.

    Args:
        world: of this rank.
        optimizer: moves slices, since what it does is elementwise.
        parts: this rank's part of each bucket that is cut in slices.
        gather: parameters are whole on every rank; else they are slices too.
        inplace: parameters and slots are moved where they are.
    """

    def __init__(
        self, world: World, optimizer: Optimizer, parts: Sequence[Part], *, gather: bool, inplace: bool
    ) -> None:
        self.world, self.optimizer, self.parts = world, optimizer, parts
        self.gather, self.inplace = gather, inplace

    def __call__(
        self, grads: Flat, slots: Mapping[str, Flat], params: Flat, step: int
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """As ``Optimizer.update``; gradients and slots are those of the slices."""
        cut = {path for part in self.parts for path in part.bucket.paths}
        whole = [path for path in grads if path not in cut]
        moved: dict[str, Tensor] = {}
        new: dict[str, dict[str, Tensor]] = {name: {} for name in slots}
        if whole:
            moved, new = self._moved(whole, grads, slots, params, step)
        under_way: list[tuple[Part, Handle]] = []
        for part in self.parts:
            own = {path: params[path] for path in part.bucket.paths}
            if self.gather:
                own = part.cut(own)
            # In memory of its own, where a state is given away or where others read what is sent.
            flat = part.joined(own) if self.inplace and not self.gather else part.fresh(own)
            views = part.views(flat)
            found, more = self._moved(part.bucket.paths, grads, slots, views, step)
            for path, view in views.items():
                if found[path] is not view:
                    view.copy_(found[path])
            for name, leaves in more.items():
                new[name].update(leaves)
            if self.gather:
                group = self.world.subgroup(part.bucket.ranks, part.bucket.label)
                under_way.append((part, group.start(AllGather(0), flat)))
            else:
                moved |= views
        for part, handle in under_way:
            moved |= part.shards(handle.wait())
        return moved, new

    def _moved(
        self, paths: Sequence[str], grads: Flat, slots: Mapping[str, Flat], params: Flat, step: int
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        def of(flat: Flat) -> dict[str, Tensor]:
            return {path: flat[path] for path in paths}

        mine = {name: of(leaves) for name, leaves in slots.items()}
        return self.optimizer.update(of(grads), mine, of(params), step, inplace=self.inplace)
