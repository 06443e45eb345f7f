"""A model: abstract parameters and an ordered list of pure layer functions. It is its own single-process reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_par import tree
from functional_par.errors import ModelError
from functional_par.init import materialize
from functional_par.par import Par
from functional_par.random import key as make_key
from functional_par.run_par import RunPar
from functional_par.spec import Param

LayerFunction = Callable[[Any, Any, Par], Any]
Paths = str | Sequence[str] | Mapping[str, str]
Batch = Mapping[str, Tensor]

LOSS = "loss"
"""Name of the loss wherever layers are named."""


@dataclass(frozen=True)
class Input:
    """Shape and dtype of one field of a batch; a floating-point field becomes the dtype of the step. ``None`` in dim 0 is
    the number of rows in a microbatch; ``None`` elsewhere is a size that the model does not fix, such as a sequence length.

    ``high``: one more than the largest integer that the field may hold (a label of -100 is ignored all the same), such as the
    size of the vocabulary; for checks that make up a batch. None leaves it open.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.int64
    high: int | None = None


class Read(NamedTuple):
    """One leaf that a layer reads: where the layer finds it, and which leaf of the model it is."""

    local: str
    path: str


@dataclass(frozen=True)
class Layer:
    """A named pure function ``fn(params, x, par) -> x`` and the leaves it reads."""

    name: str
    reads: tuple[Read, ...]
    fn: Callable[..., Any]

    def select(self, leaves: Mapping[str, Any]) -> Any:
        """The first argument of ``fn``, taken from a flat dict of leaves."""
        if self.reads and self.reads[0].local == "":
            return leaves[self.reads[0].path]
        return tree.unflatten({read.local: leaves[read.path] for read in self.reads})

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the leaves it reads, each once."""
        return tuple(dict.fromkeys(read.path for read in self.reads))


@dataclass(frozen=True)
class Model:
    """Abstract parameters, an ordered list of layers, and a loss.

    Args:
        params: nested dict of ``Param``.
        layers: ``(name, paths, fn)`` in order. ``fn(params, x, par) -> x`` is pure; ``x`` is any pytree of tensors, and
            the first layer receives the microbatch, a dict of tensors (also ``par.batch``). ``paths`` says what ``fn``
            receives as ``params``: a string is the leaf or subtree at that path; a list of strings is the tree pruned
            to these paths; a dict gives each subtree a name. The same leaf in two layers is tied.
        loss: ``fn(params, x, par) -> (sum, count)`` over this microbatch, or a pair ``(paths, fn)`` when it has
            parameters of its own (else ``params`` is an empty dict).
        batch: shape and dtype of each field; by default ``tokens`` and ``labels``, int64 of any [batch, seq].
        count: number of loss terms in a batch, needed before the first backward; by default the labels that are not
            -100, or the rows where there are no labels. It must equal what the loss returns.

    Raises:
        ModelError: for a path that does not exist, a leaf that no layer reads, or a repeated layer name.
    """

    params: Mapping[str, Any]
    layers: Sequence[Any]
    loss: Any
    batch: Mapping[str, Input] | None = None
    count: Callable[[Batch], Tensor] | None = None

    def __post_init__(self) -> None:
        for path, leaf in tree.paths(self.params):
            if not isinstance(leaf, Param):
                raise ModelError(f"params[{path!r}] is {type(leaf).__name__}, not fp.Param(shape, dims).")
        _set(self, "layers", tuple(_layer(self.params, entry) for entry in self.layers))
        _set(self, "loss", _loss(self.params, self.loss))
        if self.batch is None:
            _set(self, "batch", {"tokens": Input((None, None)), "labels": Input((None, None))})
        self._check()

    def _check(self) -> None:
        names = [layer.name for layer in self.all_layers]
        if not self.layers:
            raise ModelError("a model has at least one layer.")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ModelError(f"layer names are not unique: {', '.join(repeated)}. ('{LOSS}' is the name of the loss.)")
        read = {path for layer in self.all_layers for path in layer.paths}
        if unread := [path for path in self.leaves if path not in read]:
            raise ModelError(f"no layer reads {', '.join(unread)}: name it in a layer's paths or leave it out.")

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers, then the loss as one more."""
        return (*self.layers, self.loss)

    @cached_property
    def leaves(self) -> dict[str, Param]:
        """Dotted path to abstract parameter, in the order of the tree. Not to be modified."""
        return tree.flatten(self.params)

    def count_terms(self, batch: Batch) -> Tensor:
        """Number of loss terms in a batch, as an int64 tensor without dims."""
        if self.count is not None:
            return self.count(batch)
        if "labels" in batch:
            return (batch["labels"] != -100).sum()
        return torch.tensor(len(next(iter(batch.values()))))

    def init(self, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> dict[str, Any]:
        """All parameters whole, as a nested dict; the same values that every sharded layout starts from."""
        return tree.map_leaves(
            lambda path, leaf: init_leaf(seed, path, leaf, (0,) * len(leaf.shape), leaf.shape, dtype, device),
            self.params,
        )

    def __call__(self, params: Mapping[str, Any], batch: Batch, par: RunPar | None = None) -> Tensor:
        """Mean loss of a batch in one process: the reference that every layout must equal. What a layer draws, such as
        dropout, follows from ``par.key``, by default that of the first step from seed 0."""
        par = RunPar(batch=batch) if par is None else par
        leaves = tree.flatten(params)
        x: Any = batch
        for layer in self.layers:
            x = layer.fn(layer.select(leaves), x, par.within(layer.name))
        total, count = self.loss.fn(self.loss.select(leaves), x, par.within(LOSS))
        return total / max(int(count), 1)

    def rename(self, aliases: Mapping[str, str]) -> Model:
        """The model in which every read of a key of ``aliases`` reads its value instead, and the key is gone."""
        leaves = {path: leaf for path, leaf in self.leaves.items() if path not in aliases}
        renamed = [
            replace(layer, reads=tuple(Read(r.local, aliases.get(r.path, r.path)) for r in layer.reads))
            for layer in self.all_layers
        ]
        return replace(self, params=tree.unflatten(leaves), layers=tuple(renamed[:-1]), loss=renamed[-1])


def init_leaf(
    seed: int,
    path: str,
    leaf: Param,
    starts: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """The block of a leaf's initial value that begins at ``starts``: a function of (seed, path, global index) alone."""
    return materialize(leaf.init, make_key(seed).fold(path), leaf.shape, starts, shape, dtype, device)


def _set(model: Model, name: str, value: Any) -> None:
    object.__setattr__(model, name, value)


def _layer(params: Mapping[str, Any], entry: Any) -> Layer:
    if isinstance(entry, Layer):
        return entry
    try:
        name, paths, fn = entry
    except (TypeError, ValueError):
        raise ModelError(f"layer {entry!r} is not a (name, paths, fn) triple.") from None
    if not isinstance(name, str) or not callable(fn):
        raise ModelError(f"layer ({name!r}, ..., {fn!r}): the name is a string and fn is a function (params, x, par).")
    return Layer(name, _reads(params, name, paths), fn)


def _loss(params: Mapping[str, Any], loss: Any) -> Layer:
    if isinstance(loss, Layer):
        return loss
    paths, fn = loss if isinstance(loss, tuple) and len(loss) == 2 else ((), loss)
    if not callable(fn):
        raise ModelError(
            f"loss {loss!r} is not a function (params, x, par) -> (sum, count), or a pair (paths, function)."
        )
    return Layer(LOSS, _reads(params, LOSS, paths), fn)


def _reads(params: Mapping[str, Any], name: str, paths: Paths) -> tuple[Read, ...]:
    """Resolve what a layer names into leaves."""
    _check_paths(name, paths)
    if isinstance(paths, str):
        return tuple(Read(local, path) for local, path in _leaves_at(params, name, paths))
    if isinstance(paths, Mapping):
        found = [
            (f"{key}.{local}".rstrip("."), p) for key, at in paths.items() for local, p in _leaves_at(params, name, at)
        ]
    else:
        found = [(path, path) for at in paths for _, path in _leaves_at(params, name, at)]
    return tuple(Read(*pair) for pair in found)


def _check_paths(name: str, paths: Any) -> None:
    named = paths.values() if isinstance(paths, Mapping) else paths
    if not isinstance(paths, (str, Mapping, Sequence)) or not all(isinstance(path, str) for path in named):
        raise ModelError(f"layer {name!r} has the paths {paths!r}: a dotted name, a list of them, or a dict of names.")
    if isinstance(paths, Mapping):
        list(tree.paths(dict.fromkeys(paths)))  # the local names are keys of a tree


def _leaves_at(params: Mapping[str, Any], name: str, path: str) -> list[tuple[str, str]]:
    try:
        node = tree.get(params, path)
    except KeyError:
        known = ", ".join(tree.flatten(params))
        raise ModelError(f"layer {name!r} reads {path!r}, which is not in params. Leaves: {known}.") from None
    if isinstance(node, Mapping):
        return [(local, f"{path}.{local}") for local in tree.flatten(node)]
    return [("", path)]
