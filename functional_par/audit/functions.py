"""The ``autograd.Function``s that a layer brings along: the one place where a backward may be anything."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_par.audit.record import NOWHERE, Call
from functional_par.trace.place import Place

_OURS = "functional_par."


def find_functions(outputs: Sequence[Tensor], stops: Sequence[Tensor]) -> list[Call]:
    """A ``Call`` for each Function between the layer's inputs and its outputs, in the order in which they were called. Their
    cotangents are put into it when they are known."""
    seen: set[Any] = {x.grad_fn for x in stops}
    todo = [x.grad_fn for x in outputs]
    found: list[Any] = []
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction) and not _is_ours(node):
            found.append(node)
        todo += [following for following, _ in node.next_functions]
    return [_watched(node) for node in sorted(found, key=lambda node: node._sequence_nr())]


def _watched(node: Any) -> Call:
    kind = node._forward_cls
    call = Call(kind.__qualname__.split(".")[-1], _place(kind))

    def hook(into: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        call.into.update({i: ct.detach().clone() for i, ct in enumerate(into) if ct is not None})
        call.out.update({i: ct.detach().clone() for i, ct in enumerate(out) if ct is not None})

    node.register_hook(hook)
    return call


def _is_ours(node: Any) -> bool:
    """Written by this library, and proved by its tests: collectives, kernels."""
    return str(node._forward_cls.__module__).startswith(_OURS)


def _place(kind: Any) -> Place:
    """The line on which its backward is defined."""
    backward = inspect.unwrap(kind.backward)
    code = getattr(backward, "__code__", None)
    return Place(code.co_filename, code.co_firstlineno + 1) if code else NOWHERE
