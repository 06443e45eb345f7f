"""The trace: runs every layer once on meta tensors and infers over which axes each value varies.

From that follow each leaf's debts, and every missing or superfluous collective is an error that names the line. It never
communicates, allocates no data, and knows no rank. It must never call a wrong composition right.

The rules (those of a type system for values that are replicated or varying along an axis):

- an operation's result varies over the union of the axes of its inputs;
- an activation that carries a cotangent and meets values varying over more axes than itself is an error, since its
  cotangent would be partial and nobody would sum it;
- a parameter, or a value computed from parameters alone, in the same place *owes* these axes: the sum is linear, so it can
  be done once, on the leaf, at the end of the step. All uses of a leaf must owe the same. What was summed or gathered on
  the way is closed to such a debt;
- collectives change the type as their table in ``par`` says (``rules``);
- then the layer's backward is followed too (``dual``): the cotangent of each input must vary as its type and debts say,
  which catches an ``autograd.Function`` or a hook whose backward is wrong.

What it refuses though it may be right (write what the message says instead):

- an activation that meets values varying over more axes, though every use of all that it was computed from is such a use,
  so that one sum on the leaves would do; or though no cotangent comes back, since what follows is detached or unused;
- a sum, maximum, gather or exchange of what is the same on every rank, which one process does not compute; ``pvary`` and
  ``slice`` of what differs, also where no cotangent flows;
- operations under ``torch.no_grad`` count as differentiable, since those inside an ``autograd.Function`` look the same:
  use ``detach``, or add the ``pvary`` that is asked for, which costs nothing there;
- collectives inside the backward of an ``autograd.Function`` with another split than the forward's (Megatron's f as a
  Function): use ``par.pvary``, or ``par.kernel`` with a definition in plain operations;
- shapes that depend on values (masks as indices), Python numbers taken from tensors, forward-mode derivatives of
  collectives, writes to a tensor after it was handed to a collective.

What no type can see, and is left to the author: numbers that a hand-written backward makes up (a factor ``par.size("tp")``,
say) and what ``detach`` hides; a layer that is not a function of its arguments (globals that change, Python's own random
numbers, the rank taken from elsewhere), branches on the bits of a key, or goes another way where tensors have no data
(``x.is_meta``, an error of torch that it catches); what threads that a layer starts write to its tensors; ``fast``
kernels, which have to equal their definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.errors import MissingCollective
from functional_par.model import LOSS, Layer, Model
from functional_par.spec import Debt
from functional_par.trace.call import follow_call
from functional_par.trace.dual import Backward
from functional_par.trace.follow import Typing
from functional_par.trace.outputs import check_loss, check_output, location
from functional_par.trace.par import TracePar
from functional_par.trace.saved import saved_bytes
from functional_par.trace.setting import Setting
from functional_par.trace.values import Abstract, Axes, Collective, Source, Use, Value, names, order, quoted


@dataclass(frozen=True)
class LayerTrace:
    """What one layer does.

    Attributes:
        output: what it returns, as abstract leaves.
        uses: of its leaves.
        work: floating-point operations of its forward, about.
        passed: for each leaf of the output the leaf of the input that it is, untouched, or None for a new value.
        touched: the leaves of the input that it computes with; the others it hands on or drops.
        forward_mode: whether it takes a derivative in forward mode.
        saved: bytes that it keeps for its backward, besides parameters and the batch; kernels by their definitions.
        inner: those of them that are not its inputs.
        inputs: bytes of what goes in that it computes with, besides the batch.
        products: bytes of the results of its matrix products.
        waiting: bytes that the gradients of its weights are computed from: an input and a cotangent of each product with a
            weight, and of each look-up.
        forward: the collectives that it makes, in order; kernels by their definitions.
        backward: those of its backward, in some order.
    """

    output: Any
    uses: tuple[Use, ...]
    work: int
    passed: tuple[int | None, ...] = ()
    touched: frozenset[int] = frozenset()
    forward_mode: bool = False
    saved: int = 0
    inner: int = 0
    inputs: int = 0
    products: int = 0
    waiting: int = 0
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Result of tracing a model.

    Attributes:
        layers: one entry a layer, the loss last.
        debts: leaf path to what its gradient owes, in mesh order.
        batch: abstract fields of a microbatch.
        merged: the merged axes, larger than one each, along which layers communicate.
    """

    layers: Mapping[str, LayerTrace]
    debts: Mapping[str, tuple[Debt, ...]]
    batch: Mapping[str, Abstract] = field(default_factory=dict)
    merged: tuple[tuple[str, ...], ...] = ()


def trace(model: Model, setting: Setting) -> Trace:
    """Trace all layers and the loss.

    Raises:
        MissingCollective, SuperfluousCollective: with the layer, the line, the axis and the fix.
        ModelError: a layer that is impure, draws from torch's global generator, or reads a number out of a tensor.
    """
    tracer = _Tracer(model, setting)
    x: Any = tracer.batch
    layers = {}
    fields = frozenset(range(len(tracer.batch)))  # the leaves of x that are the batch's
    for layer in model.all_layers:
        entry = tracer.layer(layer, x)
        leaves = [leaf for i, leaf in enumerate(pytree.tree_leaves(x)) if i in entry.touched and i not in fields]
        layers[layer.name] = replace(entry, inputs=sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Abstract)))
        fields = frozenset(at for at, i in enumerate(entry.passed) if i in fields)
        x = entry.output
    final = check_loss(model.loss, layers[LOSS].output, setting.data)
    uses: dict[str, list[Use]] = {path: [] for path in model.leaves}
    for use in chain(final, *(entry.uses for entry in layers.values())):
        uses[use.source.path].append(use)
    debts = {path: _debts(path, own) for path, own in uses.items()}
    return Trace(layers, debts, tracer.batch, tuple(sorted(tracer.merged)))


class _Tracer:
    """Traces layers one after another; layers that share a function and its types are traced once."""

    def __init__(self, model: Model, setting: Setting) -> None:
        self.model, self.setting = model, setting
        data = Value(axes=setting.data, data=True)
        self.batch = {name: Abstract(shape, dtype, data) for name, (shape, dtype) in setting.batch.items()}
        self.memo: dict[Any, LayerTrace] = {}
        self.merged: set[tuple[str, ...]] = set()

    def leaf(self, path: str) -> Abstract:
        shape, axes = self.setting.leaves[path]
        trainable = self.model.leaves[path].trainable
        sources = frozenset({Source(path)}) if trainable else frozenset()
        return Abstract(
            shape, self.setting.dtype, Value(axes=axes & self.setting.active, grad=trainable, sources=sources)
        )

    def layer(self, layer: Layer, x: Any) -> LayerTrace:
        """Trace with placeholders for leaves, so that the result serves every layer of the same function and types."""
        leaves = [self.leaf(path) for path in layer.paths]
        flat_x, structure = pytree.tree_flatten(x)
        actual = [leaf.value.sources for leaf in (*leaves, *flat_x)]
        slots = tuple(_with_slot(leaf, i) for i, leaf in enumerate((*leaves, *flat_x)))
        numbers = {path: i for i, path in enumerate(layer.paths)}
        local = tuple((read.local, numbers[read.path]) for read in layer.reads)
        # By identity: a callable may compare equal to another that computes something else.
        key = (id(layer.fn), local, slots, structure)
        if key not in self.memo:
            self.memo[key] = self._run(layer, slots, structure, first=x is self.batch)
        return _fill(self.memo[key], layer.name, actual)

    def _run(self, layer: Layer, slots: tuple[Abstract, ...], structure: Any, first: bool) -> LayerTrace:
        """Call one layer function on meta tensors, then its backward, and collect what they did."""
        typing = Typing(layer.name, location(layer))
        try:
            return self._follow(typing, layer, slots, structure, first)
        finally:
            typing.forget()

    def _follow(
        self, typing: Typing, layer: Layer, slots: tuple[Abstract, ...], structure: Any, first: bool
    ) -> LayerTrace:
        batch = {name: typing.input(leaf) for name, leaf in self.batch.items()}
        inputs = [typing.input(slot) for slot in slots]
        chosen = layer.select(dict(zip(layer.paths, inputs, strict=False)))
        x = pytree.tree_unflatten(inputs[len(layer.paths) :], structure)
        par = TracePar(typing, self.setting, MappingProxyType(batch))
        output = follow_call(layer, typing, self.setting, lambda: layer.fn(chosen, x, par))
        flat = pytree.tree_leaves(check_output(layer, output))
        touched = typing.touched.copy()
        entry = LayerTrace(pytree.tree_map(typing.abstract, output), tuple(dict.fromkeys(typing.uses)), typing.work)
        entry = replace(
            entry,
            forward=tuple(typing.calls),
            forward_mode=typing.forward_mode,
            **_flow(inputs[len(layer.paths) :], flat, touched),
        )
        apart = inputs if first else inputs[: len(layer.paths)]
        tensors = [y for y in flat if isinstance(y, Tensor)]
        entry = replace(entry, saved=saved_bytes(tensors, (*apart, *batch.values())), products=typing.products.bytes)
        entry = replace(
            entry, inner=saved_bytes(tensors, (*inputs, *batch.values())), waiting=typing.products.waiting()
        )
        carriers = {i: at for at, i in enumerate(i for i, slot in enumerate(slots) if slot.value.grad)}
        backward = Backward(typing, [(_input_name(layer, i), inputs[i]) for i in carriers], location(layer))
        outputs = [(y, _owed(typing.value(y).sources, carriers)) for y in flat if isinstance(y, Tensor)]
        owed = _owed((use.source for use in entry.uses), carriers)
        follow_call(layer, typing, self.setting, lambda: backward.check(outputs, owed))
        self.merged |= par.merged
        return replace(entry, backward=tuple(typing.pulled.values()))


def _with_slot(leaf: Abstract, index: int) -> Abstract:
    if not leaf.value.sources:
        return leaf
    return replace(leaf, value=replace(leaf.value, sources=frozenset({Source(f"#{index}")})))


def _fill(entry: LayerTrace, name: str, actual: list[frozenset[Source]]) -> LayerTrace:
    """Put the real leaves in the places of the numbered ones."""

    def real(source: Source) -> Iterable[Source]:
        return (Source(s.path, s.owed | source.owed) for s in actual[int(source.path[1:])])

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, Abstract):
            return leaf
        sources = frozenset(s for source in leaf.value.sources for s in real(source))
        return replace(leaf, value=replace(leaf.value, sources=sources))

    uses = tuple(Use(s, name, use.place) for use in entry.uses for s in real(use.source))
    return replace(entry, output=pytree.tree_map(fill, entry.output), uses=uses)


def _flow(inputs: list[Tensor], outputs: list[Any], touched: set[int]) -> dict[str, Any]:
    """Which inputs come out as they are, and which are computed with."""
    places = {id(x): i for i, x in enumerate(inputs)}
    return {
        "passed": tuple(places.get(id(y)) for y in outputs),
        "touched": frozenset(i for x, i in places.items() if x in touched),
    }


def _input_name(layer: Layer, index: int) -> str:
    return layer.paths[index] if index < len(layer.paths) else "the activation that enters the layer"


def _owed(sources: Iterable[Source], carriers: Mapping[int, int]) -> dict[int, list[Axes]]:
    """The axes over which inputs that carry a cotangent owe, by their position among these."""
    owed: dict[int, list[Axes]] = {}
    for source in sources:
        owed.setdefault(carriers[int(source.path[1:])], []).append(source.owed)
    return owed


def _debts(path: str, own: list[Use]) -> tuple[Debt, ...]:
    """What a leaf owes by all its uses, which must agree."""
    if not own:
        return ()
    most = max(own, key=lambda use: len(use.source.owed))
    for use in own:
        if use.source.owed != most.source.owed:
            axes = order(most.source.owed ^ use.source.owed)
            raise MissingCollective(
                f"{path} is read whole in one place ({use}) and by computation that is split along {names(axes)} in "
                f"another ({most}). One sum at the end would be wrong for one of them: write "
                f"par.pvary(w, {quoted(axes)}) where it meets the split computation."
            )
    return tuple(
        Debt(axis, f"meets data that differ along {axis}", most.layer, str(most.place))
        for axis in order(most.source.owed)
    )
