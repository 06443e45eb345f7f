"""From whole trees to the state of one rank: how training goes on in another layout. Communicates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_par import tree
from functional_par.bucket import Slice
from functional_par.buckets import slices
from functional_par.errors import StateError
from functional_par.initial import trained
from functional_par.optim import Optimizer
from functional_par.optim.base import slot_dtype
from functional_par.optim.master import with_masters
from functional_par.plan import Plan
from functional_par.precision import Precision
from functional_par.shards import cut
from functional_par.state import State
from functional_par.zero.parts import together


def restore(
    plan: Plan,
    rank: int,
    optimizer: Optimizer,
    params: Mapping[str, Any],
    opt: Mapping[str, Mapping[str, Any]] | None,
    *,
    step: int | None,
    seed: int,
    precision: Precision,
    device: torch.device,
) -> State:
    """The state of ``rank``; see ``Step.load``."""
    if step is None and opt is not None:
        raise StateError(
            "load(opt=...) without step=...: say how many steps made it, by which rate and bias correction go on."
        )
    step = 0 if step is None else step
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise StateError(f"load(step={step!r}): the number of steps done is an integer of at least 0.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise StateError(f"load(seed={seed!r}): the seed of a run is an integer.")
    if opt is not None and not isinstance(opt, Mapping):
        raise StateError(f"load(opt=...): a dict of slots, as step.gather_opt returns it, not {type(opt).__name__}.")
    params, opt = with_masters(plan, optimizer, precision, params, opt)
    own = slices(plan, rank)
    cut = own if plan.zero == 3 else {}
    wide = _shards(plan, rank, params, "params", precision.master, device, tuple(plan.specs), cut)
    leaves = together(plan, rank, {path: leaf.to(precision.compute) for path, leaf in wide.items()})
    if opt is None:
        return State(step, seed, leaves, optimizer.init(trained(plan, wide if precision.mastered else leaves, own)))
    if set(opt) != set(optimizer.slots):
        raise StateError(
            f"load(opt=...): it has the slots {', '.join(opt) or 'none'}, but {optimizer.name} keeps "
            f"{', '.join(optimizer.slots) or 'none'}. Build the step with the optimizer that made them, or leave opt out to "
            "start it afresh."
        )
    kind, paths = slot_dtype(precision.master), tuple(path for path, spec in plan.specs.items() if spec.trainable)
    slots = {slot: _shards(plan, rank, flat, f"opt[{slot!r}]", kind, device, paths, own) for slot, flat in opt.items()}
    return State(step, seed, leaves, slots)


def _shards(
    plan: Plan,
    rank: int,
    whole: Mapping[str, Any],
    what: str,
    dtype: torch.dtype,
    device: torch.device,
    paths: tuple[str, ...],
    slices: Mapping[str, Slice],
) -> dict[str, Tensor]:
    """This rank's shards of some leaves, or its ``slices`` of them, in memory of their own. Leaves of all stages are checked:
    every rank raises alike."""
    if not isinstance(whole, Mapping):
        raise StateError(f"load({what}): a nested dict of whole leaves, not {type(whole).__name__}.")
    flat = tree.flatten(whole)
    for name, leaf in flat.items():
        _check_leaf(name, leaf, what)
    _check_names(plan, flat, what)
    flat = {plan.aliases.get(name, name): leaf for name, leaf in flat.items()}
    held, shards = plan.held(plan.mesh.coords(rank).pp), {}
    for path in paths:
        leaf, spec = flat.get(path), plan.specs[path]
        if leaf is None:
            raise StateError(f"load({what}): the tree has no tensor {path} {list(spec.shape)}.")
        if tuple(leaf.shape) != spec.shape:
            raise StateError(
                f"load({what}): {path} has shape {list(leaf.shape)}, but the model has {spec} {list(spec.shape)}. Give whole "
                "leaves, as step.gather returns them."
            )
        if path in held:
            shard = cut(plan, spec, leaf.detach(), rank)
            shards[path] = (slices[path].of(shard).clone() if path in slices else shard).to(device, dtype)
    return shards


def _check_leaf(name: str, leaf: Any, what: str) -> None:
    """Refuse what has no values that a parameter could have."""
    if not isinstance(leaf, Tensor):
        raise StateError(f"load({what}): {name} is of type {type(leaf).__name__}; every leaf is a whole tensor.")
    if leaf.is_meta or leaf.layout != torch.strided:
        kind = "on the meta device, without data" if leaf.is_meta else f"of layout {leaf.layout}"
        raise StateError(f"load({what}): {name} is {kind}; give its values, in an ordinary tensor.")
    if leaf.is_complex():
        raise StateError(f"load({what}): {name} is of {leaf.dtype}; the imaginary part would be lost.")


def _check_names(plan: Plan, flat: Mapping[str, Any], what: str) -> None:
    """No name that the model does not have, and the same values under all names of a tied leaf."""
    if unknown := [path for path in flat if path not in plan.source.leaves]:
        raise StateError(f"load({what}): the model has no leaf {', '.join(unknown)}.")
    seen: dict[str, str] = {}
    for name in flat:
        other = seen.setdefault(plan.aliases.get(name, name), name)
        if other != name and not _alike(flat[name], flat[other]):
            raise StateError(
                f"load({what}): {other} and {name} are tied in this program, but the tree has different values for them. Give "
                f"both the same, or leave {name} out."
            )


def _alike(a: Tensor, b: Tensor) -> bool:
    """The same numbers, in whatever dtype and place."""
    return a.shape == b.shape and torch.equal(a.detach().cpu().double(), b.detach().cpu().double())
