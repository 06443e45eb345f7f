"""The trace: runs every layer once on meta tensors and infers over which axes each value varies.

From that follow each leaf's debts, and every missing or superfluous collective is an error that names the line. It never
communicates, allocates no data, and knows no rank. It must never call a wrong composition right.

The rules (those of a type system for values that are replicated or varying along an axis):

- an operation's result varies over the union of the axes of its inputs;
- an activation that carries a cotangent and meets values varying over more axes than itself is an error, since its
  cotangent would be partial and nobody would sum it;
- a parameter, or a value computed from parameters alone, in the same place *owes* these axes: the sum is linear, so it can
  be done once, on the leaf, at the end of the step. All uses of a leaf must owe the same;
- collectives change the type as their table in ``par`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from functional_par.errors import MissingCollective, ModelError, ParallelError
from functional_par.model import LOSS, Layer, Model
from functional_par.spec import Debt
from functional_par.trace.par import TracePar
from functional_par.trace.place import Place
from functional_par.trace.values import Abstract, Axes, Source, Typing, Use, Value, names, order


@dataclass(frozen=True)
class LayerTrace:
    """What one layer does: its output, the uses of its leaves, and the work of its forward."""

    output: Any
    uses: tuple[Use, ...]
    work: int


@dataclass(frozen=True)
class Setting:
    """Everything that the trace depends on besides the model.

    Attributes:
        sizes: axis sizes.
        active: the axes that some transform uses; on the others every value is replicated by definition.
        data: the active axes over which the batch varies.
        leaves: local shape of each leaf and the axes it is cut along.
        batch: local shape and dtype of each field of a microbatch.
        mode, async_comm: as in ``Par``.
        dtype: of the parameters.
    """

    sizes: Mapping[str, int]
    active: Axes
    data: Axes
    leaves: Mapping[str, tuple[tuple[int, ...], Axes]]
    batch: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    mode: Any
    async_comm: bool
    dtype: torch.dtype = torch.float32


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
    for layer in model.all_layers:
        layers[layer.name] = tracer.layer(layer, x)
        x = layers[layer.name].output
    _check_loss(layers[LOSS], setting)
    uses = [use for entry in layers.values() for use in entry.uses]
    return Trace(
        layers, {path: _debts(path, uses) for path in model.leaves}, tracer.batch, tuple(sorted(tracer.merged))
    )


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
        slots = [_with_slot(leaf, i) for i, leaf in enumerate((*leaves, *flat_x))]
        local = tuple((read.local, layer.paths.index(read.path)) for read in layer.reads)
        key = (layer.fn, local, tuple(slots), structure)
        if key not in self.memo:
            parameters = dict(zip(layer.paths, slots, strict=False))
            self.memo[key] = _run(layer, parameters, pytree.tree_unflatten(slots[len(leaves) :], structure), self)
        return _fill(self.memo[key], layer.name, actual)


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
    return LayerTrace(pytree.tree_map(fill, entry.output), uses, entry.work)


def _run(layer: Layer, parameters: dict[str, Abstract], x: Any, tracer: _Tracer) -> LayerTrace:
    """Call one layer function on meta tensors and collect what it did."""
    typing = Typing(layer.name)
    batch = {name: typing.input(leaf) for name, leaf in tracer.batch.items()}
    if x is tracer.batch or (isinstance(x, dict) and x == tracer.batch):
        inputs: Any = batch
    else:
        inputs = pytree.tree_map(lambda leaf: typing.input(leaf) if isinstance(leaf, Abstract) else leaf, x)
    chosen = layer.select({path: typing.input(leaf) for path, leaf in parameters.items()})
    par = TracePar(typing, tracer.setting, batch)
    output = _call(layer, chosen, inputs, par, typing)
    tracer.merged |= par.merged
    return LayerTrace(pytree.tree_map(typing.abstract, output), tuple(typing.uses), typing.work)


def _call(layer: Layer, chosen: Any, inputs: Any, par: TracePar, typing: Typing) -> Any:
    try:
        with torch.no_grad(), torch.device("meta"), typing:
            return layer.fn(chosen, inputs, par)
    except ParallelError:
        raise
    except Exception as error:
        place = Place.of_exception(error)
        hint = ""
        if "meta tensors" in str(error) or "aten::_local_scalar_dense" in str(error):
            hint = (
                " The function runs on tensors without data, so it must not turn a tensor into a Python number or branch"
                " on one; use torch.where."
            )
        elif isinstance(error, KeyError):
            hint = (
                f" The batch is described with the fields {', '.join(par.batch)}; describe others with"
                " fp.Model(..., batch={name: fp.Input(shape, dtype)})."
            )
        raise ModelError(
            f"layer {layer.name!r} failed while it was traced, at {place}: {type(error).__name__}: {error}.{hint}"
        ) from error


def _check_loss(entry: LayerTrace, setting: Setting) -> None:
    total = entry.output[0] if isinstance(entry.output, tuple) and len(entry.output) == 2 else None
    if not isinstance(total, Abstract) or total.shape != ():
        raise ModelError("the loss returns a pair (sum, count) whose sum is a tensor without dims.")
    if not total.value.grad:
        raise ModelError("the loss does not depend on any trainable parameter.")
    if extra := order(total.value.axes - setting.data):
        raise MissingCollective(
            f"the loss differs along {names(extra)}: every rank would train on a loss of its own. "
            f"Sum its parts with par.psum(x, {', '.join(map(repr, extra))}), in the loss or in the layer before."
        )


def _debts(path: str, uses: list[Use]) -> tuple[Debt, ...]:
    """What a leaf owes by all its uses, which must agree."""
    own = [use for use in uses if use.source.path == path]
    if not own:
        return ()
    most = max(own, key=lambda use: len(use.source.owed))
    for use in own:
        if use.source.owed != most.source.owed:
            axes = order(most.source.owed ^ use.source.owed)
            raise MissingCollective(
                f"{path} is read whole in one place ({use}) and by computation that is split along {names(axes)} in "
                f"another ({most}). One sum at the end would be wrong for one of them: write "
                f"par.pvary(w, {', '.join(map(repr, axes))}) where it meets the split computation."
            )
    return tuple(
        Debt(axis, f"meets data that differ along {axis}", most.layer, str(most.place))
        for axis in order(most.source.owed)
    )
