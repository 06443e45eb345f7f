"""Records every torch operation of a layer, as its author wrote it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from functional_par.audit.record import LayerLog, tensors_in


class Operations(TorchFunctionMode):
    """While active, every operation that gives a tensor becomes a node of the log."""

    def __init__(self, log: LayerLog) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.log.silent:
            self._note(func, args, kwargs or {}, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = short_name(func)
        written = [x for x in tensors_in(out) if any(x is y for y in args)] if name != "setitem" else [args[0]]
        for x in written:
            self.log.rewrite(name, x, (args, kwargs))
        for x in tensors_in(out):
            if not any(x is y for y in written):
                self.log.note(name, x, (args, kwargs), dims=_dims(name, args, kwargs))


def short_name(func: Any) -> str:
    """The word that people use: ``add`` for ``torch.Tensor.__radd__``, ``T`` for the property."""
    *path, last = (resolve_name(func) or getattr(func, "__name__", "?")).split(".")
    if last == "__get__" and path:
        return str(path[-1])
    dunder = last.startswith("__")
    word = str(last).strip("_")
    return word[1:] if dunder and word in ("radd", "rsub", "rmul", "rdiv", "rtruediv", "rmatmul", "rpow") else word


def _dims(name: str, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """The dims that an operation names, counted from the end where negative; None where it names none."""
    if name in ("layer_norm", "rms_norm"):
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else (0,))
        return tuple(range(-len(shape), 0))
    if name in ("cross_entropy", "nll_loss"):
        return (1,) if args[0].ndim > 1 else (0,)
    given = kwargs.get("dim")
    if given is None:
        numbers = [a for a in args[1:] if not isinstance(a, (Tensor, float, bool, str)) and a is not None]
        given = numbers[0] if numbers else None
    if isinstance(given, int):
        return (given,)
    if isinstance(given, (tuple, list)) and given and all(isinstance(d, int) for d in given):
        return tuple(given)
    return None
