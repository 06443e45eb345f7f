"""What a step is made with and what it is given: checked before anything is computed or sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_par.comm.base import World
from functional_par.errors import CompositionError, ModelError, StateError
from functional_par.optim import Optimizer
from functional_par.pipeline.products import SELECTIVE
from functional_par.plan import Plan
from functional_par.state import State


def check_options(optimizer: Any, dtype: Any, clip: Any, norm: Any) -> None:
    """CompositionError for options of ``program.step`` that make no sense."""
    if not isinstance(optimizer, Optimizer):
        raise CompositionError(
            f"step(optimizer={optimizer!r}): it is one of fp.optim, such as fp.optim.adamw(lr=3e-4)."
        )
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise CompositionError(f"step(dtype={dtype!r}): parameters have a floating-point dtype, such as torch.float32.")
    if norm not in (1.0, 2.0, math.inf):
        raise CompositionError(f"norm={norm!r}: the order of the gradient norm is 1, 2 or inf.")
    if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float)) or not clip > 0):
        raise CompositionError(
            f"clip={clip!r}: the largest gradient norm is a positive number, or None for no clipping."
        )


def check_engine(plan: Plan, engine: str) -> None:
    """CompositionError for an engine that cannot keep what ``remat`` says of a layer."""
    chosen = [name for name, policy in plan.remat.items() if policy == SELECTIVE]
    if chosen and isinstance(engine, str) and engine.startswith("compile"):
        raise CompositionError(
            f"step(engine={engine!r}): of layer {chosen[0]!r} the matrix products are kept (remat), which are found as torch "
            'runs them, one by one; compiled layers run none. Take remat("full"), or engine "func" or "tape".'
        )


def check_threads(plan: Plan, world: World) -> None:
    """ModelError for a layer that torch computes wrongly in several threads at once."""
    if world.backend != "threads" or world.mesh.size == 1:
        return
    if names := [name for name, entry in plan.trace().layers.items() if entry.forward_mode]:
        raise ModelError(
            f"layer {names[0]!r} takes a derivative in forward mode (torch.func.jvp, jacfwd or hessian), of which torch has "
            "one level for all threads of a process: ranks that are threads would spoil each other's. Run ranks as processes "
            '(torchrun, backend="gloo"), or take the derivative in reverse mode (torch.func.vjp, jacrev).'
        )


def check_state(
    state: Any, shapes: Mapping[str, tuple[int, ...]], optimizer: Optimizer, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Parameters of ``state`` by path; StateError unless it has the leaves of this rank, with these ``shapes`` and in this
    dtype, and the slots of ``optimizer``."""
    if not isinstance(state, State):
        raise StateError(
            f"step({type(state).__name__}, ...): expected the state from step.init or from the step before."
        )
    flat, slots = state.flat, state.flat_opt
    if set(flat) != set(shapes):
        wrong = ", ".join(sorted(set(flat) ^ set(shapes)))
        raise StateError(f"this state belongs to another program or stage; it differs in the leaves {wrong}.")
    for path, leaf in flat.items():
        shape = shapes[path]
        if tuple(leaf.shape) != shape or leaf.dtype != dtype:
            raise StateError(
                f"this state belongs to another program, layout or dtype: {path} is {leaf.dtype}{list(leaf.shape)}, but "
                f"this step has {dtype}{list(shape)}."
            )
    if set(slots) != set(optimizer.slots):
        raise StateError(
            f"this state belongs to another optimizer: it has {', '.join(slots) or 'nothing'}, but {optimizer.name} keeps "
            f"{', '.join(optimizer.slots) or 'nothing'}. Start with step.init, or build the step with the optimizer that made "
            "the state."
        )
    return flat
