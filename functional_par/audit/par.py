"""The ``par`` of an audited layer: ``RunPar``, whose every call is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.audit.record import NOWHERE, Call, LayerLog, keep, tensors_in, watch
from functional_par.comm.base import Group
from functional_par.par import Par
from functional_par.random import Key
from functional_par.run_par import RunPar
from functional_par.trace.place import here


class RecordingPar(Par):
    """Runs what ``inner`` runs. Collectives become nodes of the log, kernels become one node each, without what is inside."""

    def __init__(self, inner: RunPar, log: LayerLog) -> None:
        self.inner, self.log = inner, log
        self.mode, self.async_comm, self.batch, self.key = inner.mode, inner.async_comm, inner.batch, inner.key

    @property
    def layer_key(self) -> Key:
        return self.inner.layer_key

    @property
    def rows(self) -> Tensor:
        return self._quiet("par.rows", lambda: self.inner.rows)

    def size(self, axis: str) -> int:
        return self.inner.size(axis)

    def group(self, axis: str) -> Group:
        return self.inner.group(axis)

    def check_stream(self, x: Tensor, what: str) -> None:
        self.inner.check_stream(x, what)

    def axis_index(self, axis: str) -> Tensor:
        return self._quiet("par.axis_index", lambda: self.inner.axis_index(axis), aware=True)

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        return self._quiet("par.psum", lambda: self.inner.psum(x, *axes), x)

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        return self._quiet("par.pmax", lambda: self.inner.pmax(x, *axes), x)

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        return self._quiet("par.pvary", lambda: self.inner.pvary(x, *axes), x)

    def all_gather(self, x: Tensor, axis: str, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
        return self._quiet("par.all_gather", lambda: self.inner.all_gather(x, axis, dim, to), x, dims=(dim,))

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._quiet("par.slice", lambda: self.inner.slice(x, axis, dim), x, dims=(dim,))

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        return self._quiet(
            "par.take", lambda: self.inner.take(x, axis, dim, starts, length), x, dims=(dim,), aware=True
        )

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._quiet("par.reduce_scatter", lambda: self.inner.reduce_scatter(x, axis, dim), x, dims=(dim,))

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        return self._quiet(
            "par.all_to_all", lambda: self.inner.all_to_all(x, axis, split, concat), x, dims=(split, concat)
        )

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        return self._quiet("par.ppermute", lambda: self.inner.ppermute(x, axis, to), x)

    def kernel(self, definition: Any, fast: Any) -> Any:
        chosen = self.inner.kernel(definition, fast)
        return chosen if self.log.silent else self._kernel(definition, chosen)

    def _kernel(self, definition: Any, chosen: Callable[..., Any]) -> Callable[..., Any]:
        name = f"kernel {getattr(definition, '__name__', '?')}"

        def run(*args: Any, **kwargs: Any) -> Any:
            call = Call(name, here() or NOWHERE)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            self.log.silent += 1
            try:
                kept = [keep(call.into, i, x) if isinstance(x, Tensor) else x for i, x in enumerate(leaves)]
                own_args, own_kwargs = pytree.tree_unflatten(kept, structure)
                out = chosen(*own_args, **own_kwargs)
                call.values = [x.detach().clone() for x in tensors_in(out)]
            finally:
                self.log.silent -= 1
            for i, x in enumerate(tensors_in(out)):
                watch(call.out, i, x)
                self.log.note(name, x, leaves, place=call.place)
            self.log.kernels.append(call)
            return out

        return run

    def _quiet(self, name: str, run: Callable[[], Tensor], *inputs: Tensor, **more: Any) -> Tensor:
        """Run without recording what is inside, then record the result, under a name of its own where it is its input."""
        self.log.silent += 1
        try:
            out = run()
            if any(out is x for x in inputs):
                out = out.view_as(out)
        finally:
            self.log.silent -= 1
        if not self.log.silent:
            self.log.note(name, out, inputs, **more)
        return out
