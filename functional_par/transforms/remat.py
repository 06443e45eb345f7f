"""``remat``: what is kept of a layer's forward for its backward. What is not kept is computed again, by the same function from
the same inputs, so it changes no bit: memory is traded for time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from functional_par.errors import CompositionError
from functional_par.pipeline.by_hand import written_out
from functional_par.pipeline.products import FULL, NONE, POLICIES
from functional_par.plan import Plan
from functional_par.transforms.base import Transform


@dataclass(frozen=True)
class Remat(Transform):
    """See ``remat``. ``policies``: pairs of a pattern and a policy, of which the last that fits a layer counts; None is every
    layer but the last one and the loss."""

    policies: tuple[tuple[str | None, str], ...]

    def __call__(self, plan: Plan) -> Plan:
        names = [layer.name for layer in plan.source.all_layers]
        chosen: dict[str, str] = {}
        for pattern, policy in self.policies:
            found = names[:-2] if pattern is None else _matching(pattern, names)
            chosen |= dict.fromkeys(found, policy)
        return replace(plan, remat={name: chosen[name] for name in names if chosen.get(name, NONE) != NONE})


def remat(policy: str | Mapping[str, str] = FULL, layers: str | Sequence[str] | None = None) -> Remat:
    """Compute activations again in backward instead of keeping them. Gradients have the same bits.

    A layer's collectives run again too, in the same order on all ranks. Dropout draws the same numbers, since they are
    functions of a key.

    Args:
        policy: ``"none"``: everything that backward needs is kept. ``"full"``: the layer's inputs, from which all of it runs
            again (arXiv 1604.06174). ``"selective"``: the inputs and the results of matrix products (``mm``, ``addmm``,
            ``bmm``, ``baddbmm`` of torch); the rest, which is cheap for its size, runs again. Torch's fused attention is no
            such product, and compiled layers have none. Or a mapping from layers to policies, of which the last that fits a
            layer counts.
        layers: names as ``explain`` prints them (``"block0"``, ``"block2-5"``), or with wildcards (``"block*"``): a list, or
            one text with spaces. By default all layers but the last one and the loss, whose backward often comes right after
            their forward.

    Raises:
        CompositionError: another policy, or, once the model is known, a name that is no layer's.

    >>> remat("full", layers=["block0", "block2-3"]).policies
    (('block0', 'full'), ('block2-3', 'full'))
    >>> remat({"block*": "selective", "block0": "none"}).policies
    (('block*', 'selective'), ('block0', 'none'))
    """
    if isinstance(policy, Mapping):
        if layers is not None:
            raise CompositionError(
                f"remat({dict(policy)!r}, layers={layers!r}): the mapping says already which layers. Leave layers out."
            )
        return Remat(tuple((word, _policy(kept)) for words, kept in policy.items() for word in _words(words)))
    return Remat(((None, _policy(policy)),) if layers is None else tuple((w, _policy(policy)) for w in _words(layers)))


def _policy(policy: Any) -> str:
    if policy not in POLICIES:
        raise CompositionError(
            f"remat({policy!r}): what is kept of a layer is one of {', '.join(map(repr, POLICIES))}."
        )
    return str(policy)


def _words(layers: Any) -> list[str]:
    words = layers.split() if isinstance(layers, str) else layers
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise CompositionError(
            f"remat(layers={layers!r}): names of layers, such as 'block0', 'block2-5' or 'block*': a list, or one text."
        )
    return list(words)


def _matching(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """The layers that a word stands for."""
    for word in written_out(pattern, names):
        found = [name for name in names if fnmatchcase(name, word)]
        if not found:
            close = get_close_matches(word, names, 1)
            raise CompositionError(
                f"remat: no layer is called {word!r}"
                + (f" (of {pattern!r})" if word != pattern else "")
                + "."
                + (f" Is it {close[0]!r}?" if close else "")
                + f" Layers: {', '.join(names)}."
            )
        yield from found
