"""Checks a layer's types once more, on its backward: the cotangent of each input must vary as its type allows.

For torch's own operations this follows from the forward. For an ``autograd.Function`` that a layer brings along it does
not: its backward may be any function, and this is where a wrong one is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from functional_par.errors import MissingCollective, ModelError, SuperfluousCollective
from functional_par.trace.follow import Typing
from functional_par.trace.values import Axes, Value, names, order, quoted


def check_backward(
    typing: Typing,
    inputs: Sequence[tuple[str, Tensor]],
    outputs: Sequence[Tensor],
    owed: Mapping[int, Axes],
    where: str,
) -> None:
    """Pull cotangents of the outputs' types back to the inputs and compare the types that arrive.

    Args:
        typing: has followed the forward, and is active.
        inputs: name and tensor of each input that carries a cotangent.
        outputs: the layer's results.
        owed: position among ``inputs`` to the axes over which the forward says that its gradient is partial.
        where: layer and line, for errors.

    Raises:
        MissingCollective: a cotangent that is partial, though nobody sums it.
        SuperfluousCollective: a cotangent that has been summed, though it will be summed again.
        ModelError: a gradient that the forward does not show, or a backward that cannot run on meta tensors.
    """
    carriers = [y for y in outputs if y.requires_grad]
    if not carriers or not inputs:
        return
    lost = [y for y in carriers if not typing.value(y).grad]
    seen = [y for y in carriers if typing.value(y).grad]
    typing.backward = True
    tensors = [x for _, x in inputs]
    for i, ct in enumerate(_pull(typing, seen, tensors, where)):
        if ct is not None and (value := typing.value(ct)).cotangent:
            _compare(inputs[i][0], typing.value(tensors[i]).axes, owed.get(i, frozenset()), value.axes, where)
    if any(ct is not None for ct in _pull(typing, lost, tensors, where)):
        raise ModelError(
            f"{where}: the layer changes memory through another name of it (detach, .data), so that one of its outputs has a "
            "gradient which its operations do not show. Write to a clone."
        )


def _pull(typing: Typing, outputs: list[Tensor], inputs: list[Tensor], where: str) -> Sequence[Tensor | None]:
    if not outputs:
        return []
    seeds = [typing.emit(y.shape, y, Value(axes=typing.value(y).axes, data=True, cotangent=True)) for y in outputs]
    try:
        return torch.autograd.grad(outputs, inputs, seeds, retain_graph=True, allow_unused=True)
    except NotImplementedError as error:
        if own := _own_functions(outputs):
            raise ModelError(
                f"{where}: the backward of {', '.join(own)} cannot be followed on meta tensors ({error}). Give the layer as "
                "plain operations, with par.kernel(definition, fast) if it has a fast form."
            ) from error
        return []


def _own_functions(outputs: Sequence[Tensor]) -> list[str]:
    """Names of the ``autograd.Function``s between inputs and outputs."""
    found: set[str] = set()
    seen, todo = set(), [y.grad_fn for y in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found.add(node.name())
        todo += [following for following, _ in node.next_functions]
    return sorted(found - {"_ApplyBackward"})


def _compare(name: str, own: Axes, owed: Axes, got: Axes, where: str) -> None:
    if extra := order(got - own - owed):
        raise MissingCollective(
            f"{where}: the backward of an autograd.Function gives {name} a cotangent that differs along {names(extra)}, but "
            f"{name} is the same on every rank of {names(extra)}: the cotangent is a partial sum that nobody adds up. Write "
            f"par.pvary(..., {quoted(extra)}) around the value before it enters the Function."
        )
    if lacking := order(owed - got):
        raise SuperfluousCollective(
            f"{where}: {name} meets values that differ along {names(lacking)}, so its gradient is to be summed over "
            f"{names(lacking)}, but the backward of an autograd.Function has already done so. Leave the sum to par: "
            f"par.pvary(..., {quoted(lacking)}) around the value, and no collective in the backward."
        )
