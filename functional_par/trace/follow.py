"""Follows every torch operation of one layer on meta tensors and gives each result its ``Value``.

What it does not recognise it refuses: a tensor of unknown origin, a write to memory that the layer does not own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from functional_par.errors import MissingCollective, ModelError, ParallelError
from functional_par.trace.place import Place, here
from functional_par.trace.values import (
    CONSTANT,
    NONE,
    Abstract,
    Axes,
    Source,
    Use,
    Value,
    constant,
    names,
    order,
    quoted,
    together,
    union,
)

_SHAPE_ONLY = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    "new_empty_strided",
}  # fmt: skip

_TOUCH = 8
"""Floating-point operations that take about as long as reading and writing one element."""

_META = torch.device("meta")

_MARK = "_functional_par_constant"


class Typing(TorchDispatchMode):
    """Knows the ``Value`` of every tensor of one layer.

    Attributes:
        uses: where leaves met data.
        touched: identities of the tensors that anything was asked of.
        forward_mode: whether a forward-mode derivative was taken.
        work: floating-point operations of the forward, about.
        backward: true while the backward of the layer is followed, where a result varies over the union of its inputs
            and nothing is refused.
        refusal: the first error of this trace, which the layer may have caught to go on another way.
    """

    def __init__(self, layer: str, location: str = "") -> None:
        super().__init__()
        self.layer, self.location = layer, location or f"layer {layer!r}"
        self.values: Any = WeakIdKeyDictionary()
        self.homes: Any = WeakIdKeyDictionary()
        self.kept: dict[int, Tensor] = {}
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}
        self.uses: list[Use] = []
        self.touched: set[int] = set()
        self.forward_mode = False
        self.work = 0
        self.backward = False
        self.refusal: ParallelError | None = None

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep the first refusal of what is done inside."""
        try:
            yield
        except ParallelError as error:
            self.refusal = self.refusal or error
            raise

    def input(self, leaf: Abstract) -> Tensor:
        """A meta tensor that stands for an input of the layer, which the layer must not modify."""
        x = leaf.empty()
        if leaf.value.grad:
            # Not a leaf of autograd, so that writing to it in place reaches the check that explains why not.
            x = x.requires_grad_().clone()
        self._note(x, leaf.value)
        self.keep(x)
        return x

    def keep(self, x: Tensor) -> None:
        """From here on modifying ``x`` in place is an error."""
        self.kept[_memory(x)] = x

    def value(self, x: Tensor) -> Value:
        """What is known of a tensor; a tensor of another device, which the layer closes over, is a constant."""
        x = self._twin(x)
        self.touched.add(id(x))
        known = self.values.get(x)
        if known is None:
            known = self._introduce(x)
            self._note(x, known)
        elif self.homes[x] != _memory(x):
            raise ModelError(f"{self.where()}: a tensor was given other memory (x.data = y). Use a new name for y.")
        return known

    def abstract(self, x: Any) -> Any:
        """Shape, dtype and value of an output leaf."""
        return Abstract(tuple(x.shape), x.dtype, self.value(x)) if isinstance(x, Tensor) else x

    def emit(self, shape: Iterable[int], like: Tensor, value: Value) -> Tensor:
        """A new meta tensor with a value of its own."""
        out = torch.empty(tuple(shape), dtype=like.dtype, device=_META)
        self._note(out, value)
        return out

    def literal(self, x: Tensor, inputs: list[Tensor]) -> None:
        """Note a tensor that torch made out of Python numbers, which no dispatch shows."""
        if x.device == _META and x not in self.values:
            self._note(x, constant([self.value(y) for y in inputs]))

    def where(self) -> str:
        place = here()
        return f"layer {self.layer!r}, {place}" if place else self.location

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.remembering():
            return self._follow(func, args, kwargs)

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._check_operation(func)
        self.forward_mode |= forward_ad._current_level >= 0
        args, kwargs = pytree.tree_map_only(Tensor, self._twin, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        values = [self.value(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = self._written(func, args, kwargs)
        out = func(*args, **kwargs)
        results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        value = self._result(func._schema.name.removeprefix("aten::"), values, results)
        for x in written:
            self._write(x, value)
        for x in results:
            if not any(x is y for y in written):
                self._note(x, _as_dtype(value, x))
        if not self.backward:
            self._count(func, args, kwargs, out, results)
        return out

    def _result(self, name: str, values: list[Value], results: list[Tensor]) -> Value:
        if name in _SHAPE_ONLY:
            return CONSTANT
        if self.backward or name == "detach" or not any(map(_differentiable, results)):
            return constant(values)
        return self.combine(values)

    def combine(self, values: list[Value]) -> Value:
        """The value of a differentiable operation's result; notes uses, and refuses what must not meet."""
        axes = union(values)
        data = any(v.data for v in values)
        carriers = [v for v in values if v.grad]
        sources: frozenset[Source] = frozenset().union(*(self.meet(v, axes - v.axes) for v in carriers))
        if data and sources:
            place = here() or Place("", 0)
            self.uses += [Use(source, self.layer, place) for source in sources]
            sources = frozenset()
        closed = frozenset().union(*(v.closed for v in carriers)) if sources else NONE
        return Value(axes, together(values), bool(carriers), data, sources, closed)

    def meet(self, v: Value, missing: Axes) -> frozenset[Source]:
        """Sources of ``v`` after it has met values that vary over the axes ``missing`` from its own."""
        if missing and (not v.sources or missing & v.closed):
            axis = order(missing & v.closed if v.sources else missing)
            what = "an activation" if not v.sources else "a value gathered or summed from parameters"
            raise MissingCollective(
                f"{self.where()}: {what} that is the same on every rank of {names(axis)} meets values that differ along "
                f"{names(axis)}. Its cotangent would be a partial sum that nobody adds up. If the values that differ are "
                f"partial sums, they lack par.psum(..., {quoted(axis)}); if not, write par.pvary(..., {quoted(axis)}) "
                "around the value that is the same, before it is used here."
            )
        return frozenset(Source(s.path, s.owed | missing) for s in v.sources)

    def _note(self, x: Tensor, value: Value) -> None:
        self.values[x], self.homes[x] = value, _memory(x)
        # Seen by later traces, to which a constant may come from a cache.
        setattr(x, _MARK, value == CONSTANT)

    def _introduce(self, x: Tensor) -> Value:
        """The value of a tensor that no operation made: another name for a known one, or nothing that may be here."""
        if self.backward:
            return CONSTANT
        aliases = [value for y, value in list(self.values.items()) if _memory(y) == _memory(x)]
        if aliases and not x.requires_grad:
            return constant(aliases)
        if aliases:
            raise ModelError(
                f"{self.where()}: a tensor of shape {list(x.shape)} is wrapped inside the layer (nn.Parameter, as_subclass), "
                "which cuts it off from what it was computed from. Use the tensor itself, or x.detach() if no gradient is "
                "meant to flow."
            )
        if getattr(x, _MARK, False):
            self.keep(x)
            return CONSTANT
        raise ModelError(
            f"{self.where()}: the layer uses a tensor of shape {list(x.shape)} that another layer, or another call, has "
            "left behind, or that was made where the trace does not see it (by a thread, as the parameter of a module). Layers "
            "are pure functions: pass it on in the layer's output; make modules outside, and call them with "
            "torch.func.functional_call."
        )

    def _twin(self, x: Tensor) -> Tensor:
        """A meta tensor in the place of one that the layer closes over, always the same."""
        if x.device == _META:
            return x
        if id(x) not in self.twins:
            if x.requires_grad:
                raise ModelError(
                    f"{self.where()}: the layer closes over a tensor of shape {list(x.shape)} that requires a gradient. "
                    "It would get none: make it a leaf of params and name it in the layer's paths."
                )
            twin = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_META)
            self.twins[id(x)] = x, twin
            self._note(twin, CONSTANT)
            self.keep(twin)
        return self.twins[id(x)][1]

    def _check_operation(self, func: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModelError(
                f"{self.where()}: {func} draws from torch's global generator, so the result would depend on the rank and "
                "on what ran before. Draw with functional_par.random, whose numbers follow from a key and an index."
            )
        if "c10d" in func.namespace:
            raise ModelError(
                f"{self.where()}: {func} communicates behind the back of par, so its derivative cannot be checked. Use "
                "par.psum, par.all_gather and the others, which name their axis."
            )
        if func._schema.name == "aten::set_":
            raise ModelError(
                f"{self.where()}: set_ gives a tensor other memory, which a layer must not do. Use a new name."
            )

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an operation modifies, none of which may be an input of the layer."""
        if not func._schema.is_mutable:
            return []
        schema = func._schema.arguments
        given = [kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(schema)]
        targets = [value for a, value in zip(schema, given, strict=True) if a.alias_info and a.alias_info.is_write]
        written = [x for x in pytree.tree_leaves(targets) if isinstance(x, Tensor)]
        if not self.backward and any(_memory(x) in self.kept for x in written):
            raise ModelError(
                f"{self.where()}: {func._schema.name.removeprefix('aten::')} modifies in place an input of the layer, a "
                "tensor that was made outside of it, or one that was handed to a collective. Layers are pure functions: "
                "write to a clone."
            )
        return written

    def _write(self, x: Tensor, value: Value) -> None:
        """After a write, every tensor that shares the memory has met what was written."""
        for alias in list(self.values):
            if _memory(alias) == _memory(x):
                both = [self.values[alias], value]
                met = both[0] if both[0] == value else constant(both) if self.backward else self.combine(both)
                self._note(alias, _as_dtype(met, alias))

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> None:
        """Add the floating-point operations of matrix products and, for anything else that is not a view, the cost of
        touching every element. An estimate: where a formula does not know the arguments it is left out."""
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            try:
                self.work += int(formula(*args, **kwargs, out_val=out))
                return
            except Exception:
                pass
        given = {_memory(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        if func._schema.is_mutable or not any(_memory(x) in given for x in results):
            self.work += _TOUCH * sum(x.numel() for x in results)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _as_dtype(value: Value, x: Tensor) -> Value:
    return value if _differentiable(x) else replace(value, grad=False, sources=frozenset())
