"""What is known of one of torch's operations from its declaration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from functional_par.errors import ModelError
from functional_par.trace import shapes

_SHAPE_ONLY = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided",
}  # fmt: skip

_TOUCH = 8
"""Floating-point operations that take about as long as reading and writing one element."""


@dataclass(frozen=True)
class Operation:
    """The declaration of an operation.

    Attributes:
        name: without the namespace.
        shape_only: whether its result has nothing of its arguments but their shape.
        detaches: whether no cotangent goes through it.
        draws: whether it takes numbers from torch's global generator.
        communicates: whether it is one of torch.distributed's.
        mutable: whether it modifies an argument.
        writes: position and name of the arguments that it modifies.
    """

    name: str
    shape_only: bool
    detaches: bool
    draws: bool
    communicates: bool
    mutable: bool
    writes: tuple[tuple[int, str], ...]

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that a call modifies."""
        targets = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes]
        return [x for x in pytree.tree_leaves(targets) if isinstance(x, Tensor)]


@cache
def operation(func: Any) -> Operation:
    """The declaration of ``func``."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    return Operation(
        name,
        shape_only=name in _SHAPE_ONLY,
        detaches=name == "detach",
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        communicates="c10d" in func.namespace,
        mutable=schema.is_mutable,
        writes=tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write),
    )


def check(func: Any, op: Operation, where: Callable[[], object]) -> None:
    """ModelError for an operation that no layer may use."""
    if op.draws:
        raise ModelError(
            f"{where()}: {func} draws from torch's global generator, so the result would depend on the rank and "
            "on what ran before. Draw with functional_par.random, whose numbers follow from a key and an index."
        )
    if op.communicates:
        raise ModelError(
            f"{where()}: {func} communicates behind the back of par, so its derivative cannot be checked. Use "
            "par.psum, par.all_gather and the others, which name their axis."
        )
    if op.name == "set_":
        raise ModelError(f"{where()}: set_ gives a tensor other memory, which a layer must not do. Use a new name.")


def work(func: Any, args: Any, kwargs: Any, out: Any, new: int) -> int:
    """Floating-point operations of a call: those of matrix products and, for anything else, the cost of touching every
    element of the ``new`` ones. An estimate: where a formula does not know the arguments it is left out."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        try:
            return shapes.products(formula, args, kwargs, out)
        except Exception:
            pass
    return _TOUCH * new


def tensors(given: Any) -> Iterator[Tensor]:
    """All tensors among the arguments or results of a call."""
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors(x)
