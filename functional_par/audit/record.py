"""What one rank, or the single process, did in each layer: values, cotangents and, where asked for, every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from functional_par.trace.place import Place, here

NOWHERE = Place("", 0)

Key = tuple[str, Place, int]
"""Name of an operation, its line, and how many of that name ran on that line before it in this call of the layer."""


@dataclass(frozen=True)
class Node:
    """One operation, collective or input of a layer.

    Attributes:
        key: the same for the same operation on every rank.
        value: what it gave; None for what cannot be copied.
        inputs: the nodes that gave its arguments, as indices.
        aware: whether it follows from the position of the rank (``par.axis_index``, ``par.take``).
        dims: the dims that it acts on, where its arguments say; None if it may be all.
    """

    key: Key
    value: Tensor | None
    inputs: tuple[int, ...] = ()
    aware: bool = False
    dims: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        return self.key[0]

    @property
    def place(self) -> Place:
        return self.key[1]


@dataclass
class Call:
    """A kernel, or an ``autograd.Function``: what came in and went out, forward and backward.

    Attributes:
        name, place: of the kernel's line, or of the Function's backward.
        values: results.
        out, into: cotangents of the results, and those that it returned for its inputs.
    """

    name: str
    place: Place
    values: list[Tensor] = field(default_factory=list)
    out: dict[int, Tensor] = field(default_factory=dict)
    into: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class LayerLog:
    """One call of one layer.

    Attributes:
        inputs: cotangents of the leaves of ``x``, by position.
        params: cotangents of the parameters, by path.
        outputs: the leaves of the result.
        nodes: what the layer did, in order; filled only while ``deep``.
        kernels, functions: see ``Call``; filled only while ``deep``.
        ends: position of an output to its node.
        arguments: the layer's arguments, kept where its derivative is to be checked.
    """

    deep: bool = False
    inputs: dict[int, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    kernels: list[Call] = field(default_factory=list)
    functions: list[Call] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    arguments: Any = None
    silent: int = 0
    _index: dict[int, int] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)
    _seen: Counter[tuple[str, Place]] = field(default_factory=Counter)

    def note(
        self,
        name: str,
        x: Tensor,
        arguments: Sequence[Any] = (),
        *,
        aware: bool = False,
        dims: tuple[int, ...] | None = None,
        place: Place | None = None,
    ) -> None:
        """Record a result and which recorded tensors it was made from."""
        place = place or here() or NOWHERE
        for y in tensors_in(arguments):
            if id(y) not in self._index and y.is_floating_point():
                self._add(y, Node(self._key("unrecorded", place), self._copied(y), tuple(range(len(self.nodes)))))
        inputs = tuple(dict.fromkeys(self._index[id(y)] for y in tensors_in(arguments) if id(y) in self._index))
        aware = aware or any(self.nodes[i].aware for i in inputs)
        self._add(x, Node(self._key(name, place), self._copied(x), inputs, aware, dims))

    def _key(self, name: str, place: Place) -> Key:
        self._seen[name, place] += 1
        return name, place, self._seen[name, place]

    def _copied(self, x: Tensor) -> Tensor | None:
        """A copy, made without being recorded itself."""
        self.silent += 1
        try:
            return None if is_wrapped(x) else x.detach().clone()
        finally:
            self.silent -= 1

    def _add(self, x: Tensor, node: Node) -> None:
        self._index[id(x)] = len(self.nodes)
        self._alive.append(x)
        self.nodes.append(node)

    def rewrite(self, name: str, x: Tensor, arguments: Sequence[Any] = ()) -> None:
        """Record what an operation wrote into ``x``, and that other tensors of the same memory changed with it."""
        self.note(name, x, arguments)
        memory = _memory(x)
        sharing = {id(y): y for y in self._alive if y is not x and _memory(y) == memory}
        for y in sharing.values():
            self.note(name, y, (x, y))

    def finish(self, outputs: Sequence[Tensor]) -> None:
        """Record the layer's results, and let go of its tensors."""
        self.outputs = [x.detach().clone() for x in outputs]
        self.ends = {i: self._index[id(x)] for i, x in enumerate(outputs) if id(x) in self._index}
        self._alive, self._index = [], {}


@dataclass
class Recorder:
    """The log of each (layer, first row of the batch that it worked on), of one rank or of the single process.

    Attributes:
        deep: the layers of which every operation is recorded.
        keeps_arguments: whether to keep the arguments of layers that bring an ``autograd.Function``.
    """

    deep: frozenset[str] = frozenset()
    keeps_arguments: bool = False
    logs: dict[tuple[str, int], LayerLog] = field(default_factory=dict)

    def log(self, layer: str, first_row: int) -> LayerLog:
        log = self.logs[layer, first_row] = LayerLog(layer in self.deep)
        return log


def keep(into: dict[Any, Tensor], key: Any, x: Tensor) -> Tensor:
    """``x`` under another name, whose cotangent will be put into a dict."""
    if not x.requires_grad:
        return x
    y = x.view_as(x)
    watch(into, key, y)
    return y


def watch(into: dict[Any, Tensor], key: Any, x: Tensor) -> None:
    """Put the cotangent of ``x``, when it is known, into a dict."""
    if x.requires_grad and not is_wrapped(x):

        def hook(ct: Tensor) -> None:
            into[key] = into[key] + ct.detach() if key in into else ct.detach().clone()

        x.register_hook(hook)


def _memory(x: Tensor) -> int | None:
    return None if is_wrapped(x) else x.untyped_storage().data_ptr()


def is_wrapped(x: Tensor) -> bool:
    """Whether torch.func has wrapped the tensor; it must not be kept beyond the transformation."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def by_key(nodes: Sequence[Node]) -> Mapping[Key, Node]:
    """The nodes of one call, by key."""
    return {node.key: node for node in nodes}
