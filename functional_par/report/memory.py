"""Whether a plan can fit into this machine at all: known before the first parameter is drawn, which may take minutes."""

from __future__ import annotations

import os

import torch

from functional_par.errors import ConfigError
from functional_par.pipeline.memory import held_bytes
from functional_par.plan import Plan
from functional_par.zero.memory import held_elements


def check_memory(plan: Plan, dtype: torch.dtype, backend: str, available: int | None = None) -> None:
    """Raise ConfigError if parameters, their master copies if any, and gradients alone are more than the machine has.

    A lower bound: activations, optimizer and batch come on top. GPUs say themselves when they are full.

    Args:
        plan: what each rank holds.
        dtype: of parameters.
        backend: "threads" has every rank on this machine, "gloo" as many as torchrun says.
        available: bytes; None asks the machine.
    """
    available = physical_memory() if available is None else available
    if available is None or backend == "nccl":
        return
    held = [sum(held_bytes(plan, plan.held(pp), plan.precise(dtype), 0)) for pp in range(plan.mesh.pp)]
    if backend == "threads":
        ranks, needed = plan.mesh.size, sum(held) * (plan.mesh.size // len(held))
    else:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = min(held) * ranks
    if needed > available:
        raise ConfigError(
            f"model: parameters and gradients of {ranks} ranks take {needed / 1e9:,.0f} GB, but this machine has "
            f"{available / 1e9:,.0f} GB. Make model.d_model, model.n_layers or model.vocab smaller, or use more machines."
        )


def held_by(plan: Plan, pp: int) -> int:
    """Elements of the parameters that each rank at a pp coordinate holds."""
    return held_elements(plan, plan.held(pp)).parameters


def physical_memory() -> int | None:
    """Bytes of this machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
