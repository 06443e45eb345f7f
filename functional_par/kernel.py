"""``Kernel``: an autograd Function that costs little to call under ``torch.func.vjp``.

Each call of a Function inside a transform of torch.func makes a class, flattens pytrees and binds a signature in Python, which
takes the better part of a millisecond. Under one ``vjp`` of plain tensors, which is how a layer runs, none of that is needed:
the inputs are unwrapped, ``forward`` runs below the transform, and its outputs are wrapped. Everything else goes torch's way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

_functorch: Any = torch._C._functorch
_BELOW = 1
"""The level of a transform with no other around it."""


class Kernel(torch.autograd.Function):
    """A Function in ``setup_context`` form whose arguments are tensors and opaque objects, all given at each call. ``forward``
    returns a tensor or a tuple, and none of its inputs as they are."""

    _single: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._single = _single_level(cls)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As that of any Function."""
        top = _functorch.peek_interpreter_stack()
        args = tuple(_functorch.unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in args)
        if top is None:
            beyond: Any = super(torch.autograd.Function, cls)  # which does not bind the signature
            return beyond.apply(*args)
        if top.level() != _BELOW or top.key() != _functorch.TransformType.Grad or not _are_plain(args):
            return super().apply(*args)
        before = _functorch.get_single_level_autograd_function_allowed()
        _functorch.set_single_level_autograd_function_allowed(True)
        try:
            return cls._single.apply(*args)
        finally:
            _functorch.set_single_level_autograd_function_allowed(before)


def outside_transforms() -> bool:
    """Whether no transform of torch.func is around: a tensor made inside one does not outlive it."""
    return _functorch.peek_interpreter_stack() is None


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Whether nothing below the transform is differentiated."""
    if forward_ad._current_level >= 0:
        return False
    return not any(isinstance(x, Tensor) and _functorch._unwrap_for_grad(x, _BELOW).requires_grad for x in args)


def _single_level(kernel: type[Kernel]) -> Any:
    """The kernel as a Function of one level: what ``torch.func`` would make of it at each call."""

    def forward(*args: Any) -> Any:
        below = [_functorch._unwrap_for_grad(x, _BELOW) if isinstance(x, Tensor) else x for x in args]
        transform = _functorch.pop_dynamic_layer_stack()
        try:
            out = kernel.forward(*below)
        finally:
            _functorch.push_dynamic_layer_stack(transform)
        if isinstance(out, Tensor):
            return _functorch._wrap_for_grad(out, _BELOW)
        return tuple(_functorch._wrap_for_grad(x, _BELOW) if isinstance(x, Tensor) else x for x in out)

    parts = {"forward": forward, "setup_context": kernel.setup_context, "backward": kernel.backward}
    return type(kernel.__name__, (_SingleLevelFunction,), {name: staticmethod(f) for name, f in parts.items()})
