"""AdamW with decoupled weight decay (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from functional_par.errors import ConfigError
from functional_par.optim import base
from functional_par.optim.base import Flat, Lr, Optimizer, Slots

_SLOTS = ("exp_avg", "exp_avg_sq")


def adamw(
    lr: Lr,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay: Callable[[str], bool] = lambda path: True,
) -> Optimizer:
    """AdamW. Moments and arithmetic are float32, or float64 for float64 parameters.

    A parameter in a lower precision is rounded back after each step (no master copy), so small updates of it are lost.

    Args:
        lr: learning rate, or a function of the step number (from 0).
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root of the second moment, after the correction of its bias.
        weight_decay: each step multiplies a leaf by ``1 - lr * weight_decay``.
        decay: which leaves decay, by path; all by default.

    Raises:
        ConfigError: if a number is out of its range.

    >>> optimizer = adamw(lr=0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> params, slots = optimizer.update(
    ...     {"w": torch.tensor([2.0, -2.0])}, optimizer.init(params), params, step=0, inplace=False
    ... )
    >>> params["w"]
    tensor([0.9000, 1.1000])
    """
    if len(betas) != 2:
        raise ConfigError(f"adamw(betas) = {betas!r}: two numbers are needed.")
    beta1, beta2 = (base.fraction(f"adamw(betas)[{i}]", beta) for i, beta in enumerate(betas))
    eps, weight_decay = base.non_negative("adamw(eps)", eps), base.non_negative("adamw(weight_decay)", weight_decay)
    rate = base.as_schedule(lr, "adamw")

    @torch.no_grad()
    def update(
        grads: Flat, slots: Slots, params: Flat, step: int, *, inplace: bool
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        new, state = base.writable(params, slots, grads, inplace)
        kernel = partial(_fused, lr=rate(step), beta1=beta1, beta2=beta2, eps=eps, count=step + 1)
        for paths in base.groups(params, grads):
            kernel([path for path in paths if decay(path)], new, grads, state, weight_decay=weight_decay)
            kernel([path for path in paths if not decay(path)], new, grads, state, weight_decay=0.0)
        return new, state

    return Optimizer("adamw", _SLOTS, lambda params: base.zero_slots(_SLOTS, params), update, rate)


def _fused(
    paths: list[str],
    params: Flat,
    grads: Flat,
    slots: Slots,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    count: int,
) -> None:
    """Torch's fused kernel, one pass over memory, on leaves of one dtype and device; it wants them contiguous."""
    if not paths:
        return
    old = [[flat[path] for path in paths] for flat in (params, slots["exp_avg"], slots["exp_avg_sq"])]
    dtype = base.slot_dtype(old[0][0].dtype)
    leaves, first, second = work = [[base.work_tensor(leaf, dtype) for leaf in leaves] for leaves in old]
    torch._fused_adamw_(
        leaves,
        [base.work_tensor(grads[path], dtype) for path in paths],
        first,
        second,
        [],
        [torch.tensor(float(count), device=leaves[0].device)] * len(paths),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    for new, leaf in zip(chain(*work), chain(*old), strict=True):
        base.write_back(new, leaf)
