"""What is kept of a layer that is computed again: by policy, and the results of its matrix products."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_par.errors import ModelError

NONE, FULL, SELECTIVE = POLICIES = ("none", "full", "selective")
"""See ``functional_par.transforms.remat``."""

_aten = torch.ops.aten
PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default})
"""What counts as a product. Those that write to given memory (``out=``, ``addmm_``) are not, and run again."""


class Product(NamedTuple):
    """One product: what was computed, of which shapes, and the result in memory of its own."""

    what: Any
    shapes: tuple[torch.Size, ...]
    result: Tensor


@dataclass(frozen=True, eq=False)
class Products:
    """The products of one call of a layer, in order; each is given back once.

    Attributes:
        layer: its name, for messages.
        kept: those that have not been given back.
    """

    layer: str
    kept: deque[Product] = field(default_factory=deque)

    def recording(self) -> AbstractContextManager[Any]:
        """While the layer runs for the first time."""
        return _Recording(self.kept)

    def replaying(self) -> AbstractContextManager[Any]:
        """While it runs again, in the same thread or another: products come from the first run.

        Raises:
            ModelError: it computes others than in its first run.
        """
        return _Replaying(self.layer, self.kept)


class _Recording(TorchDispatchMode):
    """Sits below transforms of torch.func and autograd, so what it sees are plain tensors; of this thread alone."""

    def __init__(self, kept: deque[Product]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            # A copy, since the layer may write to its own result, or give its memory to a collective.
            self.kept.append(Product(func, _shapes(args), out.clone()))
        return out


class _Replaying(TorchDispatchMode):
    def __init__(self, layer: str, kept: deque[Product]) -> None:
        super().__init__()
        self.layer, self.kept = layer, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        now, before = (func, _shapes(args)), self.kept.popleft() if self.kept else None
        if before is None or before[:2] != now:
            raise _another(self.layer, _shown(*now), "no more" if before is None else _shown(*before[:2]))
        return before.result

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None and self.kept:
            raise _another(self.layer, "no more", _shown(*self.kept[0][:2]))


def _shapes(args: Any) -> tuple[torch.Size, ...]:
    return tuple(x.shape for x in pytree.tree_leaves(args) if isinstance(x, Tensor))


def _shown(what: Any, shapes: tuple[torch.Size, ...]) -> str:
    return f"{what._schema.name.removeprefix('aten::')} of {', '.join(str(list(shape)) for shape in shapes)}"


def _another(layer: str, now: str, before: str) -> ModelError:
    return ModelError(
        f"layer {layer!r}, whose matrix products are kept (remat), computed other products when it ran again: {now} instead of "
        f"{before}. A layer does the same at every call: let it not depend on what changes from one call to the next."
    )
