"""Checks a layer's types once more, on its backward: the cotangent of each input must vary as its type allows.

For torch's own operations this follows from the forward. For an ``autograd.Function`` that a layer brings along it does
not: its backward may be any function, and this is where a wrong one is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from functional_par.errors import MissingCollective, ModelError, SuperfluousCollective
from functional_par.trace.follow import Typing
from functional_par.trace.values import NONE, Axes, Value, names, order, quoted

Owed = Mapping[int, Sequence[Axes]]
"""Position of an input to the axes over which the forward says that its gradient is partial, once for each of its uses."""


@dataclass(frozen=True)
class Backward:
    """The backward of one layer.

    Attributes:
        typing: has followed the forward, and is active.
        inputs: name and tensor of each input that carries a cotangent.
        where: layer and line, for errors.
    """

    typing: Typing
    inputs: Sequence[tuple[str, Tensor]]
    where: str

    def check(self, outputs: Sequence[tuple[Tensor, Owed]], owed: Owed) -> None:
        """Pull cotangents of the outputs' types back to the inputs and compare the types that arrive.

        Args:
            outputs: the layer's results, each with what it owes to inputs that it is a function of without data.
            owed: what inputs owe since they met data within the layer.

        Raises:
            MissingCollective: a cotangent that is partial, though nobody sums it.
            SuperfluousCollective: a cotangent that has been summed, though it will be summed again.
            ModelError: a gradient that the forward does not show, or a backward that cannot run on meta tensors.
        """
        carriers = [(y, own) for y, own in outputs if y.requires_grad]
        lost = [y for y, _ in carriers if not self.typing.value(y).grad]
        seen = [(y, own) for y, own in carriers if self.typing.value(y).grad]
        self.typing.backward = True
        self._compare([y for y, own in seen if not own], owed)
        for y, own in seen:
            if own:
                # By itself: where these leaves meet data later they may owe something else.
                self._compare([y], own)
        if any(ct is not None for ct in self._pull(lost)):
            raise ModelError(
                f"{self.where}: the layer changes memory through another name of it (detach, .data), so that one of its "
                "outputs has a gradient which its operations do not show. Write to a clone."
            )

    def _compare(self, outputs: list[Tensor], owed: Owed) -> None:
        for i, ct in enumerate(self._pull(outputs)):
            if ct is not None:
                name, x = self.inputs[i]
                self._compare_one(name, self.typing.value(x).axes, owed.get(i, ()), self.typing.value(ct))

    def _compare_one(self, name: str, own: Axes, owed: Sequence[Axes], ct: Value) -> None:
        if extra := order(ct.axes - own.union(*owed)):
            self._partial(name, extra)
        # Uses that disagree are told of when all of them are known.
        due = owed[0].intersection(*owed) if owed else NONE
        if ct.cotangent and (lacking := order(due - ct.axes)):
            self._paid(name, lacking, "has already done so")
        if mixed := order(ct.mixed & due - own):
            self._paid(name, mixed, "has already done so for a part of it")

    def _pull(self, outputs: list[Tensor]) -> Sequence[Tensor | None]:
        if not outputs or not self.inputs:
            return []
        typing = self.typing
        seeds = [typing.emit(y.shape, y, Value(typing.value(y).axes, data=True, cotangent=True)) for y in outputs]
        try:
            return torch.autograd.grad(
                outputs, [x for _, x in self.inputs], seeds, retain_graph=True, allow_unused=True
            )
        except NotImplementedError as error:
            if own := _own_functions(outputs):
                raise ModelError(
                    f"{self.where}: the backward of {', '.join(own)} cannot be followed on meta tensors ({error}). Give the "
                    "layer as plain operations, with par.kernel(definition, fast) if it has a fast form."
                ) from error
            return []

    def _partial(self, name: str, axes: tuple[str, ...]) -> NoReturn:
        raise MissingCollective(
            f"{self.where}: the backward of an autograd.Function gives {name} a cotangent that differs along {names(axes)}, "
            f"but {name} is the same on every rank of {names(axes)}: the cotangent is a partial sum that nobody adds up. "
            f"Write par.pvary(..., {quoted(axes)}) around the value before it enters the Function."
        )

    def _paid(self, name: str, axes: tuple[str, ...], done: str) -> NoReturn:
        raise SuperfluousCollective(
            f"{self.where}: {name} meets values that differ along {names(axes)}, so its gradient is to be summed over "
            f"{names(axes)}, but the backward of an autograd.Function {done}. Leave the sum to par: "
            f"par.pvary(..., {quoted(axes)}) around the value, and no collective in the backward."
        )


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
