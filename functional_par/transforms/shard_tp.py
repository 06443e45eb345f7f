"""``shard_tp``: cut named dims over the tensor-parallel ranks. The transpose of a slice is a concatenation: a sharded
leaf owes nothing over tp. A leaf that stays whole but meets split data owes a sum over tp, which the trace finds.

At run time the collectives are in the layers (``fp.nn``), which ask ``par`` for the mode.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from functional_par.errors import CompositionError
from functional_par.par import TensorParallelMode
from functional_par.plan import Plan
from functional_par.spec import Spec
from functional_par.transforms.base import Transform

Uneven = Literal["error", "pad", "replicate"]


@dataclass(frozen=True)
class ShardTP(Transform):
    """See ``shard_tp``."""

    mode: TensorParallelMode
    async_comm: bool
    dims: tuple[tuple[str, Uneven], ...]
    chosen: bool = False

    def __call__(self, plan: Plan) -> Plan:
        self._check_names(plan)
        specs = {path: self._shard(spec, plan.mesh.tp) for path, spec in plan.specs.items()}
        return replace(plan, specs=specs, mode=self.mode, async_comm=self.async_comm).use("tp")

    def _check_names(self, plan: Plan) -> None:
        """A dim that the user names exists: of a misspelt one nothing would be cut."""
        known = dict.fromkeys(name for leaf in plan.source.leaves.values() for name in leaf.names)
        for name, rule in self.dims if self.chosen else ():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise CompositionError(
                    f"shard_tp(dims={{{name!r}: {rule!r}}}): no leaf has a dim {name!r}."
                    + (f" Did you mean {near[0]!r}?" if near else "")
                    + f" Dims of this model: {', '.join(known)}."
                )

    def _shard(self, spec: Spec, tp: int) -> Spec:
        rules = dict(self.dims)
        cut = [i for i, name in enumerate(spec.names) if name in rules]
        if len(cut) > 1:
            raise CompositionError(
                f"shard_tp: {spec.path} has the dims {', '.join(repr(spec.names[i]) for i in cut)} ({spec}), and more than one "
                "of them would lie on tp. Rename one, or pass shard_tp(dims={...}) with the dims to cut."
            )
        for i in cut:
            name, size = spec.names[i], spec.shape[i]
            if size % tp and rules[name] == "replicate":
                continue
            if size % tp and rules[name] == "error":
                raise CompositionError(
                    f"shard_tp: dim {name!r} of {spec.path} has size {size}, which tp={tp} does not divide "
                    f"({size} % {tp} = {size % tp}). Choose a tp that divides {size}, or change the model."
                )
            spec = replace(spec, axes=(*spec.axes[:i], "tp", *spec.axes[i + 1 :]))
        return spec


def shard_tp(
    mode: TensorParallelMode | str = TensorParallelMode.ALL_REDUCE,
    async_comm: bool = False,
    dims: Mapping[str, Uneven] | None = None,
) -> ShardTP:
    """Cut leaves over tp by the names of their dims.

    Args:
        mode: whether activations between layers are whole on every rank (ALL_REDUCE) or split on the sequence
            (REDUCE_SCATTER). Any case, ``-`` or ``_``.
        async_comm: overlap collectives with the computation that does not need them.
        dims: name of a dim to what happens when tp does not divide it: ``"error"``, ``"pad"`` (with zeros at the end) or
            ``"replicate"``. By default ``vocab`` is padded, ``heads`` and ``ffn`` must divide, and ``kv_heads`` stay whole.

    Raises:
        CompositionError: an unknown mode or rule, an option that is not a boolean, a dim in ``dims`` that no leaf has, two
            such dims in one leaf, or a size that tp does not divide.
    """
    default: dict[str, Uneven] = {"vocab": "pad", "heads": "error", "kv_heads": "replicate", "ffn": "error"}
    rules = default if dims is None else dict(dims)
    for name, rule in rules.items():
        if rule not in ("error", "pad", "replicate"):
            raise CompositionError(f"shard_tp(dims={{{name!r}: {rule!r}}}): the rule is 'error', 'pad' or 'replicate'.")
    if not isinstance(async_comm, bool):
        raise CompositionError(f"shard_tp(async_comm={async_comm!r}): it is True or False.")
    return ShardTP(TensorParallelMode.parse(mode), async_comm, tuple(sorted(rules.items())), chosen=dims is not None)
