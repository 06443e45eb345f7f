"""Layers compiled by ``torch.compile``: a compiled forward and backward for each layer function, for all layers that share it.

A layer is compiled by its definitions in plain operations, which the compiler fuses; collectives are calls between compiled
pieces. Weights are differentiated like inputs, so the backward is one piece, and W of a split backward is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from functional_par.comm import collectives
from functional_par.errors import ModelError, ParallelError
from functional_par.run_par import RunPar
from functional_par.vjp import Pull, tape_vjp

LayerFunction = Callable[[Any, Any, Mapping[str, Tensor]], Any]
"""``(params, x, batch) -> y``"""


class Compiler:
    """An engine of differentiation, see ``functional_par.vjp``, that compiles the layers of one rank at their first calls.

    Args:
        backend: of ``torch.compile``.
    """

    def __init__(self, backend: str) -> None:
        import torch._dynamo.config  # takes seconds, so only here

        self.backend = backend
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, _VARIANTS)
        self._calls = SimpleNamespace(**{name: torch.compiler.disable(f) for name, f in _COLLECTIVES.items()})
        self._made: dict[int, tuple[Any, LayerFunction]] = {}  # with the layer functions, so that an id stays theirs

    def __call__(self, f: Callable[..., Any], *primals: Tensor) -> tuple[list[Tensor], list[Tensor], Pull]:
        """The vjp of a function that calls compiled ones."""
        return tape_vjp(f, *primals)

    def layer(self, fn: Callable[..., Any], par: RunPar) -> LayerFunction:
        """A layer function, compiled; of ``par`` it keeps what is the same at every call."""
        known = self._made.get(id(fn))
        if known is None:
            static = replace(par, fast=False, capture=None, batch={}, key=cast(Any, _NoKey()), calls=self._calls)
            known = self._made[id(fn)] = fn, self._compile(fn, static)
        return known[1]

    def _compile(self, fn: Callable[..., Any], par: RunPar) -> LayerFunction:
        def run(params: Any, x: Any, batch: Mapping[str, Tensor]) -> Any:
            return fn(params, x, replace(par, batch=batch))

        run.__code__ = run.__code__.replace()  # of its own, since what is compiled is kept by code
        compiled: LayerFunction = torch.compile(run, backend=self.backend, dynamic=False)
        return compiled


_VARIANTS = 128
"""How often torch may compile one function of ``fp.nn``, of which layers and ranks that are threads need one each."""

_COLLECTIVES = {
    f.__name__: f
    for f in (
        collectives.psum,
        collectives.pmax,
        collectives.pvary,
        collectives.all_gather,
        collectives.slice,
        collectives.take,
        collectives.reduce_scatter,
        collectives.all_to_all,
        collectives.ppermute,
    )
}


class _NoKey:
    """Instead of the key of a step: a compiled layer would draw the same numbers at every step."""

    def fold(self, *names: Any) -> Any:
        raise ModelError(
            'a layer draws random numbers, which compiled layers cannot: build the step with engine="func" or "tape", or the '
            "model with a dropout of 0."
        )


def compiler(name: str) -> Compiler:
    """The engine of a name such as ``compile``, which is inductor's, or ``compile:aot_eager``.

    Raises:
        ParallelError: no backend of that name.
    """
    backend, known = name.partition(":")[2] or "inductor", torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ParallelError(f"engine {name!r}: torch.compile has no backend {backend!r}; it has {', '.join(known)}.")
    return Compiler(backend)
