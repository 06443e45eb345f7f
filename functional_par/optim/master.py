"""An optimizer that moves a copy of the parameters in a wider dtype, of which the parameters are the rounded values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_par import tree
from functional_par.errors import StateError
from functional_par.optim.base import Flat, Optimizer, Slots
from functional_par.precision import Precision

if TYPE_CHECKING:
    from functional_par.plan import Plan

MASTER = "master"
"""Name of the slot."""


def with_master(optimizer: Optimizer, precision: Precision) -> Optimizer:
    """The optimizer with the slot ``"master"``, if the precision has one. Elementwise as any: how a leaf is cut does not
    matter.

    ``init`` takes parameters in any dtype, of which the master has the values; so give it those that are not yet rounded.

    Raises:
        StateError: the optimizer has a slot of that name.
    """
    if not precision.mastered:
        return optimizer
    if MASTER in optimizer.slots:
        raise StateError(f"optimizer {optimizer.name}: a slot {MASTER!r} of its own is in the way of fp.precision's.")

    def init(params: Flat) -> dict[str, dict[str, Tensor]]:
        masters = {path: leaf.detach().to(precision.master, copy=True) for path, leaf in params.items()}
        return {**optimizer.init(masters), MASTER: masters}

    @torch.no_grad()
    def update(
        grads: Flat, slots: Slots, params: Flat, step: int, *, inplace: bool
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        inner = {name: slots[name] for name in optimizer.slots}
        masters, new = optimizer.update(grads, inner, slots[MASTER], step, inplace=inplace)
        moved = {path: _rounded(masters[path], params[path], inplace) for path in grads}
        return {**params, **moved}, {**new, MASTER: masters}

    return replace(optimizer, slots=(*optimizer.slots, MASTER), init=init, update=update)


def with_masters(
    plan: Plan, optimizer: Optimizer, precision: Precision, params: Any, opt: Mapping[str, Any] | None
) -> tuple[Any, Mapping[str, Any] | None]:
    """Whole parameters and slots for a step of this precision, from those of a step of any. Parameters take the values of their
    master, if there is one; a master that is needed and not there takes those of the parameters.

    Raises:
        StateError: parameters that are not the rounded values of their master.
    """
    masters = None if opt is None else opt.get(MASTER)
    keeps = MASTER in optimizer.slots
    if opt is None or not isinstance(params, Mapping) or (keeps and not precision.mastered):
        return params, opt
    flat = tree.flatten(params)
    names = {path: plan.aliases.get(path, path) for path in flat}
    if masters is None:
        trained = {
            path: x for path, x in flat.items() if (s := plan.specs.get(names[path])) is not None and s.trainable
        }
        return params, ({**opt, MASTER: tree.unflatten(trained)} if keeps else opt)
    wide = {plan.aliases.get(path, path): x for path, x in tree.flatten(masters).items()}
    values = {path: wide.get(names[path], x) for path, x in flat.items()}
    if wrong := [path for path, x in flat.items() if not _rounds(values[path], x)]:
        raise StateError(
            f"load(params, opt): {wrong[0]} is not the rounded value of opt[{MASTER!r}], from which the next step goes on. "
            f"Give those of one state; or leave opt[{MASTER!r}] out, and the parameters as given are the master."
        )
    return tree.unflatten(values), opt if keeps else {name: slot for name, slot in opt.items() if name != MASTER}


def _rounds(master: Any, leaf: Any) -> bool:
    """Whether the leaf has the rounded values of the master; true for what is no such tensor, which others refuse."""
    alike = isinstance(master, Tensor) and isinstance(leaf, Tensor) and master.shape == leaf.shape
    return not alike or leaf.is_meta or torch.equal(master.to(leaf.device, leaf.dtype), leaf)


def _rounded(master: Tensor, leaf: Tensor, inplace: bool) -> Tensor:
    return leaf.copy_(master) if inplace else master.to(leaf.dtype)
