"""The one seam of differentiation: ``vjp(f, *primals) -> (outputs, aux, pull)``.

Two engines stand behind it and give the same bits: ``torch.func.vjp``, and detached leaves with
``torch.autograd.grad``, which costs less a call. A pullback may run once; it frees what it saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from functional_par.errors import ModelError, ParallelError

Function = Callable[..., tuple[list[Tensor], list[Tensor]]]
Pull = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
Engine = Callable[..., tuple[list[Tensor], list[Tensor], Pull]]


def func_vjp(f: Function, *primals: Tensor) -> tuple[list[Tensor], list[Tensor], Pull]:
    """Differentiate with ``torch.func.vjp``.

    Args:
        f: pure function of floating-point tensors; returns floating-point outputs and tensors without a gradient.
        primals: floating-point tensors.

    Returns:
        outputs, aux, and the pullback from cotangents of the outputs to cotangents of the primals.
    """
    if not primals:
        outputs, aux = f()
        return outputs, aux, lambda cotangents: ()
    try:
        outputs, pull, aux = cast(Any, torch.func.vjp(f, *primals, has_aux=True))
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise ModelError(
            "a layer uses torch.utils.checkpoint or other saved-tensor hooks, which torch.func does not support. Build the "
            'step with program.step(..., engine="tape").'
        ) from error

    def once(cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return pull(list(cotangents), retain_graph=False, create_graph=False)

    return outputs, aux, once


def tape_vjp(f: Function, *primals: Tensor) -> tuple[list[Tensor], list[Tensor], Pull]:
    """Differentiate with ``torch.autograd.grad`` on detached copies of the primals; see ``func_vjp``."""
    leaves = [primal.detach().requires_grad_() for primal in primals]
    with torch.enable_grad():
        outputs, aux = f(*leaves)

    def once(cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = [(y, ct) for y, ct in zip(outputs, cotangents, strict=True) if y.requires_grad]
        if not pairs:
            return tuple(torch.zeros_like(leaf) for leaf in leaves)
        ys, cts = zip(*pairs, strict=True)
        return torch.autograd.grad(ys, leaves, cts, allow_unused=True, materialize_grads=True)

    return [y.detach() for y in outputs], [a.detach() for a in aux], once


def undifferentiated(f: Function, *primals: Tensor) -> tuple[list[Tensor], list[Tensor], Pull]:
    """The value alone, of which nothing is kept: for evaluation. There is no pullback to run."""
    with torch.no_grad():
        outputs, aux = f(*primals)
    return outputs, aux, _no_pullback


def _no_pullback(cotangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    raise ModelError("this value was computed without a derivative.")


_ENGINES: dict[str, Any] = {"func": func_vjp, "tape": tape_vjp}


def engine(name: str) -> Engine:
    """The engine of that name: ``"func"``, ``"tape"``, or ``"compile"``, see ``functional_par.pipeline.compiled``."""
    if isinstance(name, str) and name.partition(":")[0] == "compile":
        from functional_par.pipeline.compiled import compiler  # which imports a compiler

        return compiler(name)
    if name not in _ENGINES:
        raise ParallelError(f"engine {name!r}: it is one of {', '.join(_ENGINES)}, compile.")
    return _ENGINES[name]
