"""What an optimizer is: three pure functions. Everything is elementwise, so how a leaf is sharded never matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from functional_par.errors import ConfigError, StateError

Flat = Mapping[str, Tensor]
"""Leaves by dotted path."""

Slots = Mapping[str, Flat]
"""Optimizer state: slot name, then path, to a tensor of the leaf's shape."""

Lr = float | Callable[[int], float]
"""A learning rate, or a function of the step number."""


class Update(Protocol):
    """``(grads, slots, params, step, inplace=) -> (params, slots)``; ``step`` counts the steps done before this one."""

    def __call__(
        self, grads: Flat, slots: Slots, params: Flat, step: int, *, inplace: bool
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]: ...


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as data.

    Attributes:
        name: for reports.
        slots: names of the tensors kept for each leaf.
        init: ``params -> slots``, all zero.
        update: one step; leaves its arguments alone, or with ``inplace=True`` works in the memory of ``params`` and
            ``slots`` and returns the same tensors. Both give the same bits.
        lr: learning rate of the step with a given number, counted from 0.
    """

    name: str
    slots: tuple[str, ...]
    init: Callable[[Flat], dict[str, dict[str, Tensor]]]
    update: Update
    lr: Callable[[int], float]


def slot_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the moments and of the arithmetic: never below float32."""
    return torch.promote_types(dtype, torch.float32)


def zero_slots(names: tuple[str, ...], params: Flat) -> dict[str, dict[str, Tensor]]:
    """A zero for each slot and leaf."""
    return {name: {path: _zero(leaf) for path, leaf in params.items()} for name in names}


def _zero(leaf: Tensor) -> Tensor:
    return torch.zeros(leaf.shape, dtype=slot_dtype(leaf.dtype), device=leaf.device)


def writable(
    params: Flat, slots: Slots, grads: Flat, inplace: bool
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Parameters and slots that an update may write to: the same tensors, or copies of those with a gradient.

    Raises:
        StateError: if the paths or shapes of gradients and slots are not those of the parameters.
    """
    _check(params, slots, grads)
    if inplace:
        return dict(params), {name: dict(slot) for name, slot in slots.items()}

    def own(flat: Flat) -> dict[str, Tensor]:
        return {path: leaf.clone() if path in grads else leaf for path, leaf in flat.items()}

    return own(params), {name: own(slot) for name, slot in slots.items()}


def _check(params: Flat, slots: Slots, grads: Flat) -> None:
    for path, grad in grads.items():
        if path not in params:
            raise StateError(f"optimizer: a gradient for {path!r}, which is not a parameter.")
        for what, tensor in [("gradient", grad), *((f"slot {n!r}", slot.get(path)) for n, slot in slots.items())]:
            if tensor is None:
                raise StateError(f"optimizer: {what} has no {path!r}; the state was made by init of other parameters.")
            if tensor.shape != params[path].shape:
                shapes = f"{tuple(tensor.shape)}, the parameter {tuple(params[path].shape)}"
                raise StateError(f"optimizer: {what} of {path!r} is {shapes}; they have to agree.")


def work_tensor(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """``leaf`` itself if it is contiguous and of ``dtype``, else such a copy; see ``write_back``."""
    return leaf.to(dtype).contiguous()


def write_back(work: Tensor, leaf: Tensor) -> None:
    """Copy what ``work_tensor`` had to copy into its leaf again."""
    if work.data_ptr() != leaf.data_ptr():
        leaf.copy_(work)


def groups(params: Flat, grads: Flat) -> Iterator[list[str]]:
    """Paths of the leaves that have a gradient, in batches of one dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for path in grads:
        if params[path].numel():
            kinds.setdefault((params[path].dtype, params[path].device), []).append(path)
    yield from kinds.values()


def as_schedule(lr: Lr, optimizer: str) -> Callable[[int], float]:
    """``lr`` as a function of the step; raises ConfigError for a negative or infinite number."""
    if callable(lr):
        return lr
    rate = non_negative(f"{optimizer}(lr)", lr)
    return lambda step: rate


def non_negative(what: str, value: float) -> float:
    """The value as a float; raises ConfigError that says ``what`` it is, if it is negative or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{what} = {value!r}: a finite number of at least 0 is needed.")
    return float(value)


def fraction(what: str, value: float) -> float:
    """The value as a float; raises ConfigError that says ``what`` it is, unless it is in [0, 1)."""
    if not 0 <= non_negative(what, value) < 1:
        raise ConfigError(f"{what} = {value!r}: a number in [0, 1) is needed.")
    return float(value)
