"""Applies a rule inside a traced layer so that derivatives, also those taken inside the layer, apply its transpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_par.errors import ModelError, ParallelError
from functional_par.trace.rules import Rule


def apply(x: Tensor, rule: Rule) -> Tensor:
    """Run a rule so that derivatives, also those taken inside the layer, apply its transpose."""
    return _Apply.apply(x, rule)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, rule: Rule) -> Tensor:
        try:
            return rule.run(x)
        except ParallelError as error:
            rule.typing.refused(error)
            raise

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Rule], output: Tensor) -> None:
        ctx.rule = inputs[1]
        if not ctx.rule.differentiable:
            ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return (apply(cotangent, ctx.rule.transpose) if ctx.rule.differentiable else None), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor | None:
        raise ModelError(
            f"{ctx.rule.where}: a forward-mode derivative (torch.func.jvp, jacfwd) of {ctx.rule.label}. torch keeps the state "
            "of forward mode in the process, where ranks that are threads would mix theirs: use torch.func.vjp, grad or jacrev."
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, rule: Rule) -> tuple[Tensor, int]:
        return apply(x.movedim(in_dims[0], 0), rule.batched()), 0
