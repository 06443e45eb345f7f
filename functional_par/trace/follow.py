"""Follows every torch operation of one layer on meta tensors and gives each result its ``Value``.

What it does not recognise it refuses: a tensor of unknown origin, a write to memory that the layer does not own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from functional_par.errors import MissingCollective, ModelError, ParallelError
from functional_par.trace import shapes
from functional_par.trace.known import Known, marked_constant, memory_of
from functional_par.trace.operation import Operation, check, operation, tensors, work
from functional_par.trace.place import Place, Where, here
from functional_par.trace.products import Products
from functional_par.trace.values import (
    CONSTANT,
    NONE,
    Abstract,
    Axes,
    Collective,
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

_META = torch.device("meta")


class Typing(TorchDispatchMode):
    """Knows the ``Value`` of every tensor of one layer.

    Attributes:
        uses: where leaves met data.
        touched: identities of the tensors that anything was asked of.
        forward_mode: whether a forward-mode derivative was taken.
        work: floating-point operations of the forward, about.
        products: what its matrix products leave behind.
        backward: true while the backward of the layer is followed, where a result varies over the union of its inputs
            and nothing is refused.
        calls: the collectives of the forward, those of derivatives that are taken in it included, in order.
        pulled: those of the backward, by the rule that makes each: it runs once, however often it is followed.
        refusal: the first error of this trace, which the layer may have caught to go on another way.
    """

    def __init__(self, layer: str, location: str = "") -> None:
        super().__init__()
        self.layer, self.location = layer, location or f"layer {layer!r}"
        self.known = Known()
        self.combined: dict[tuple[Value, ...], Value] = {}
        self.kept: dict[int, Tensor] = {}
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}
        self.uses: list[Use] = []
        self.touched: set[int] = set()
        self.forward_mode = False
        self.work = 0
        self.products = Products()
        self.backward = False
        self.calls: list[Collective] = []
        self.pulled: dict[Any, Collective] = {}
        self.refusal: ParallelError | None = None

    def forget(self) -> None:
        """Let go of all tensors: their graphs lead back here, by ways that Python's collector does not see."""
        self.known.forget()
        self.pulled.clear()
        self.kept.clear()
        self.twins.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing compiles while a layer is followed, and torch's guard against it costs more than a rule.
        return False

    def refused(self, error: ParallelError) -> None:
        """Remember an error, of which the first counts."""
        self.refusal = self.refusal or error

    def input(self, leaf: Abstract) -> Tensor:
        """A meta tensor that stands for an input of the layer, which the layer must not modify."""
        x = leaf.empty()
        if leaf.value.grad:
            # Not a leaf of autograd, so that writing to it in place reaches the check that explains why not.
            x = x.requires_grad_().clone()
        self.known.note(x, leaf.value)
        self.keep(x)
        return x

    def keep(self, x: Tensor) -> None:
        """From here on modifying ``x`` in place is an error."""
        self.kept[memory_of(x)] = x

    def value(self, x: Tensor) -> Value:
        """What is known of a tensor; a tensor of another device, which the layer closes over, is a constant."""
        if not x.is_meta:
            x = self._twin(x)
        self.touched.add(id(x))
        known = self.known.value(x)
        if known is None:
            known = self._introduce(x)
            self.known.note(x, known)
        elif self.known.home(x) != memory_of(x):
            raise ModelError(f"{self.where()}: a tensor was given other memory (x.data = y). Use a new name for y.")
        return known

    def abstract(self, x: Any) -> Any:
        """Shape, dtype and value of an output leaf."""
        return Abstract(tuple(x.shape), x.dtype, self.value(x)) if isinstance(x, Tensor) else x

    def emit(self, shape: Iterable[int], like: Tensor, value: Value) -> Tensor:
        """A new meta tensor with a value of its own."""
        # What the trace itself makes is no operation of the layer.
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            out = torch.empty(tuple(shape), dtype=like.dtype, device=_META)
        self.known.note(out, value)
        return out

    def called(self, rule: Any, collective: Collective) -> None:
        """Note a collective that a rule stands for."""
        if self.backward:
            self.pulled[rule] = collective
        else:
            self.calls.append(collective)

    def literal(self, x: Tensor, inputs: list[Tensor]) -> None:
        """Note a tensor that torch made out of Python numbers, which no dispatch shows."""
        if x.is_meta and x not in self.known:
            self.known.note(x, constant([self.value(y) for y in inputs]))

    def where(self) -> Where:
        return Where(self.layer, here(), self.location)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._follow(func, args, kwargs)
        except ParallelError as error:
            self.refused(error)
            raise

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        op = operation(func)
        check(func, op, self.where)
        self.forward_mode |= forward_ad._current_level >= 0
        kwargs = kwargs or {}
        given = list(tensors((args, tuple(kwargs.values())) if kwargs else args))
        if not all(x.is_meta for x in given):
            args, kwargs = pytree.tree_map_only(Tensor, self._twin, (args, kwargs))
            given = list(tensors((args, tuple(kwargs.values()))))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        values = [self.value(x) for x in given]
        written = self._written(op, args, kwargs) if op.mutable else []
        out = shapes.run(func, args, kwargs)
        results = [out] if isinstance(out, Tensor) else list(tensors(out)) if isinstance(out, (list, tuple)) else []
        value = self._result(op, values, results)
        for x in written:
            self._write(x, value)
        for x in results:
            if not any(x is y for y in written):
                self.known.note(x, _as_dtype(value, x))
        if not self.backward:
            self.work += self._counted(func, op, args, kwargs, out, given, results)
            self.products.note(func, given, values, out)
        return out

    def _result(self, op: Operation, values: list[Value], results: list[Tensor]) -> Value:
        if op.shape_only:
            return CONSTANT
        if self.backward or op.detaches or not any(map(_differentiable, results)):
            return constant(values)
        return self.combine(values)

    def combine(self, values: list[Value]) -> Value:
        """The value of a differentiable operation's result; notes uses, and refuses what must not meet."""
        key = tuple(values)
        if key in self.combined:
            return self.combined[key]
        before = len(self.uses)
        value = self._combine(values)
        if len(self.uses) == before:
            self.combined[key] = value
        return value

    def _combine(self, values: list[Value]) -> Value:
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

    def _introduce(self, x: Tensor) -> Value:
        """The value of a tensor that no operation made: another name for a known one, or nothing that may be here."""
        if self.backward:
            return CONSTANT
        aliases = [self.known[y] for y in self.known.sharing(x)]
        if aliases and not x.requires_grad:
            return constant(aliases)
        if aliases:
            raise ModelError(
                f"{self.where()}: a tensor of shape {list(x.shape)} is wrapped inside the layer (nn.Parameter, as_subclass), "
                "which cuts it off from what it was computed from. Use the tensor itself, or x.detach() if no gradient is "
                "meant to flow."
            )
        if marked_constant(x):
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
        if x.is_meta:
            return x
        if id(x) not in self.twins:
            if x.requires_grad:
                raise ModelError(
                    f"{self.where()}: the layer closes over a tensor of shape {list(x.shape)} that requires a gradient. "
                    "It would get none: make it a leaf of params and name it in the layer's paths."
                )
            twin = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_META)
            self.twins[id(x)] = x, twin
            self.known.note(twin, CONSTANT)
            self.keep(twin)
        return self.twins[id(x)][1]

    def _written(self, op: Operation, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an operation modifies, none of which may be an input of the layer."""
        written = op.written(args, kwargs)
        if not self.backward and any(memory_of(x) in self.kept for x in written):
            raise ModelError(
                f"{self.where()}: {op.name} modifies in place an input of the layer, a tensor that was made outside of it, "
                "or one that was handed to a collective. Layers are pure functions: write to a clone."
            )
        return written

    def _write(self, x: Tensor, value: Value) -> None:
        """After a write, every tensor that shares the memory has met what was written."""
        for alias in self.known.sharing(x):
            both = [self.known[alias], value]
            met = both[0] if both[0] == value else constant(both) if self.backward else self.combine(both)
            self.known.note(alias, _as_dtype(met, alias))

    def _counted(
        self, func: Any, op: Operation, args: Any, kwargs: Any, out: Any, given: list[Tensor], results: list[Tensor]
    ) -> int:
        """Floating-point operations of one call; views are free."""
        homes = {self.known.home(x) for x in given}
        view = not op.mutable and any(self.known.home(x) in homes for x in results)
        return work(func, args, kwargs, out, 0 if view else sum(x.numel() for x in results))


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _as_dtype(value: Value, x: Tensor) -> Value:
    if _differentiable(x) or not (value.grad or value.sources):
        return value
    return replace(value, grad=False, sources=frozenset())
