"""``reparam``: leaves as functions of other leaves. A map on the parameters like every transform, of the user's own making:
frozen leaves, low-rank adapters, weight normalisation. Its transpose is the derivative that the layers take anyway, so what
the new leaves owe follows from the same trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor

from functional_par import tree
from functional_par.errors import CompositionError, ModelError
from functional_par.model import Layer, Model, Read
from functional_par.par import Par
from functional_par.plan import Plan
from functional_par.spec import Param
from functional_par.transforms.base import Transform

NewLeaves = Callable[[str, Param], Param | Mapping[str, Param]]
Value = Callable[[Any, Par], Tensor]


@dataclass(frozen=True)
class Reparam(Transform):
    """See ``reparam``."""

    patterns: tuple[str, ...]
    leaves: NewLeaves
    value: Value | None

    repeatable: ClassVar[bool] = True

    def on_model(self, model: Model) -> Model:
        found = [path for path in model.leaves if any(fnmatchcase(path, pattern) for pattern in self.patterns)]
        for pattern in self.patterns:
            if not any(fnmatchcase(path, pattern) for path in model.leaves):
                raise CompositionError(f"reparam: no leaf matches {pattern!r}. Leaves: {', '.join(model.leaves)}.")
        made = {path: self._make(path, model.leaves[path]) for path in found}
        params = tree.unflatten({path: made.get(path, leaf) for path, leaf in model.leaves.items()})
        names = {path: tuple(new) if isinstance(new, Mapping) else None for path, new in made.items()}
        wrapped: dict[Any, Any] = {}
        layers = [self._layer(layer, names, wrapped) for layer in model.all_layers]
        return replace(model, params=params, layers=tuple(layers[:-1]), loss=layers[-1])

    def __call__(self, plan: Plan) -> Plan:
        return plan

    def _make(self, path: str, leaf: Param) -> Param | Mapping[str, Param]:
        try:
            made = self.leaves(path, leaf)
        except Exception as error:
            raise CompositionError(
                f"reparam: leaves(...) failed for {path} ({leaf.dims}, {list(leaf.shape)}): {type(error).__name__}: {error}."
            ) from error
        entries = list(made.items()) if isinstance(made, Mapping) else [("it", made)]
        if not entries:
            raise CompositionError(
                f"reparam: {path} becomes no leaf at all; give an fp.Param, or a dict of some. For a constant take a leaf "
                "with trainable=False."
            )
        for name, new in entries:
            if not isinstance(new, Param) or not isinstance(name, str) or not name or "." in name:
                raise CompositionError(
                    f"reparam: the new leaves of {path} are {made!r}; give an fp.Param, or a dict of a few by name, "
                    "without dots."
                )
        if isinstance(made, Mapping) and self.value is None:
            raise CompositionError(
                f"reparam: {path} becomes the leaves {', '.join(made)}, so value=... has to say what layers read in its place."
            )
        return made

    def _layer(self, layer: Layer, names: Mapping[str, tuple[str, ...] | None], wrapped: dict[Any, Any]) -> Layer:
        """The layer that reads the new leaves, and works out the old ones."""
        if not any(read.path in names for read in layer.reads):
            return layer
        reads: list[Read] = []
        for read in layer.reads:
            for name in names.get(read.path) or ("",):
                reads.append(Read(_join(read.local, name), _join(read.path, name)))
        at = tuple(dict.fromkeys(read.local for read in layer.reads if read.path in names))
        fn = layer.fn
        if self.value is not None:
            # Layers of one function stay layers of one function, which are traced once.
            fn = wrapped.setdefault((id(fn), at), Reparametrised(fn, at, self.value))
        return Layer(layer.name, tuple(reads), fn)


@dataclass(frozen=True, eq=False)
class Reparametrised:
    """A layer function whose parameters at ``places`` are worked out from what lies there."""

    __wrapped__: Callable[..., Any]
    places: tuple[str, ...]
    value: Value

    def __call__(self, params: Any, x: Any, par: Par) -> Any:
        for place in self.places:
            params = self._worked_out(params, place.split(".") if place else [], par)
        return self.__wrapped__(params, x, par)

    def _worked_out(self, params: Any, keys: list[str], par: Par) -> Any:
        if keys:
            return {**params, keys[0]: self._worked_out(params[keys[0]], keys[1:], par)}
        value = self.value(params, par)
        if not isinstance(value, Tensor):
            raise ModelError(f"reparam(value=...): it returns {type(value).__name__}, not a tensor.")
        return value


def reparam(*patterns: str, leaves: NewLeaves, value: Value | None = None) -> Reparam:
    """Replace leaves by others, of which layers read a function.

    Several are applied in the order of the transforms, each to the leaves that the one before made; all come before ``tie``,
    ``shard_tp`` and the other transforms, which see the new leaves and their dims.

    Args:
        patterns: dotted paths, with wildcards as in ``fnmatch`` (``"blocks.*.mlp.up.weight"``).
        leaves: ``(path, param) -> Param`` for one leaf in its place (frozen, say), or ``-> {name: Param}`` for several, at
            ``path.name``. Name their dims as the old leaf's, so that they are cut alike.
        value: ``(new, par) -> tensor``, pure: what a layer reads in place of the leaf, from this rank's shard of the new
            leaf, or the dict of them. It may use the collectives of ``par``. By default the new leaf itself.

    Raises:
        CompositionError: a pattern that no leaf matches, new leaves that are not ``Param``, several without ``value``.

    >>> freeze = reparam("embed.*", leaves=lambda path, leaf: replace(leaf, trainable=False))
    """
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise CompositionError(f"reparam{patterns!r}: name the leaves by patterns, such as 'blocks.*.mlp.up.weight'.")
    for what, given in (("leaves", leaves), ("value", value)):
        if given is not None and not callable(given):
            raise CompositionError(f"reparam({what}={given!r}): it is a function.")
    return Reparam(patterns, leaves, value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")
