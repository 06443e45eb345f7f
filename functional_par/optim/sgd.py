"""Stochastic gradient descent with momentum, as ``torch.optim.SGD`` defines it."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_par.errors import ConfigError
from functional_par.optim import base
from functional_par.optim.base import Flat, Lr, Optimizer, Slots


def sgd(lr: Lr, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """SGD; ``weight_decay`` is added to the gradient. Arithmetic is in float32 or better.

    Args:
        lr: learning rate, or a function of the step number (from 0).
        momentum: decay of the running sum of gradients; 0 keeps none.
        nesterov: look ahead along the momentum.
        weight_decay: times the parameter, added to the gradient.

    Raises:
        ConfigError: if a number is out of its range, or ``nesterov`` comes without momentum.

    >>> optimizer = sgd(lr=0.5)
    >>> params, _ = optimizer.update({"w": torch.tensor([1.0])}, {}, {"w": torch.tensor([3.0])}, step=0, inplace=False)
    >>> params["w"]
    tensor([2.5000])
    """
    momentum, weight_decay = (
        base.fraction("sgd(momentum)", momentum),
        base.non_negative("sgd(weight_decay)", weight_decay),
    )
    if nesterov and not momentum:
        raise ConfigError("sgd(nesterov=True) with momentum = 0.0: Nesterov's method looks along a momentum; set one.")
    rate = base.as_schedule(lr, "sgd")
    names = ("momentum",) if momentum else ()

    def direction(grad: Tensor, leaf: Tensor, slot: Tensor | None) -> Tensor:
        grad = grad + weight_decay * leaf if weight_decay else grad
        if slot is None:
            return grad
        slot.mul_(momentum).add_(grad)
        return slot * momentum + grad if nesterov else slot

    @torch.no_grad()
    def update(
        grads: Flat, slots: Slots, params: Flat, step: int, *, inplace: bool
    ) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        new, state = base.writable(params, slots, grads, inplace)
        for path, grad in grads.items():
            dtype = base.slot_dtype(new[path].dtype)
            leaf = new[path].to(dtype)
            move = direction(grad.to(dtype), leaf, state["momentum"][path] if momentum else None)
            new[path].copy_(leaf.sub_(move * rate(step)))
        return new, state

    return Optimizer("sgd", names, lambda params: base.zero_slots(names, params), update, rate)
