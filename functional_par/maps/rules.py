"""How torch's operations act on ``Kind``. A short list of linear operations keeps partial sums, a longer one keeps blocks;
whatever is not known works on whole values alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from functional_par.maps.types import WHOLE, Kind, NotLinear, listed, need_no_sum, quoted

Bound = Mapping[str, Any]
"""Arguments of an operation by the names of its schema."""

KindOf = Callable[[Tensor], Kind]


def result(func: Any, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
    """The kind of one result of an operation.

    Raises:
        NotLinear: an operation that does not fit the kinds of its inputs.
    """
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in _flat(bound.values()) if isinstance(x, Tensor)]
    kinds = [kind_of(x) for x in tensors]
    if all(kind == WHOLE for kind in kinds):
        return WHOLE
    if name in ("zeros_like", "ones_like", "full_like", "empty_like"):
        return Kind(cut=kinds[0].cut)
    if rule := _RULES.get(name):
        if not out.is_floating_point():
            need_no_sum(f"{name}, to {out.dtype},", kinds)
        return rule(name, bound, kind_of, out)
    if torch.Tag.pointwise in func.tags:
        need_no_sum(name, kinds)
        return Kind(cut=_aligned(name, tensors, kinds, out))
    need_no_sum(name, kinds)
    cut = frozenset().union(*(kind.axes for kind in kinds))
    raise NotLinear(
        f"{name} of a value that is cut along {listed(cut)}: its result would depend on how the leaf is cut. Sums over a dim, "
        "products and elementwise operations are known here; for others make the value whole, with leaf.all_gather or by "
        "leaf.psum of a sum over the cut dim, and take this rank's block of the result, with leaf.slice."
    )


def _flat(values: Any) -> list[Any]:
    return [y for x in values for y in (x if isinstance(x, (list, tuple)) else [x])]


def _aligned(name: str, tensors: Sequence[Tensor], kinds: Sequence[Kind], out: Tensor) -> frozenset[tuple[str, int]]:
    """Blocks that are combined elementwise, with broadcasting: all are cut alike, or have one entry there."""
    cut = frozenset(
        (axis, dim + out.ndim - x.ndim) for x, kind in zip(tensors, kinds, strict=True) for axis, dim in kind.cut
    )
    if len({axis for axis, _ in cut}) < len(cut):
        raise NotLinear(f"{name} of values that are cut along the same axis in different dims. Transpose one of them.")
    for axis, dim in cut:
        for x, kind in zip(tensors, kinds, strict=True):
            at = dim - (out.ndim - x.ndim)
            if at >= 0 and x.shape[at] > 1 and (axis, at) not in kind.cut:
                raise NotLinear(
                    f"{name} of a value that is cut along {axis} in dim {dim} and one that is not: every rank would combine "
                    "its block with the same numbers. Cut both alike: ones_like and the like are cut as their argument."
                )
    return cut


def _scale(name: str, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
    """Products and quotients: linear in one factor."""
    pair = [x for x in (bound.get("self"), bound.get("other")) if isinstance(x, Tensor)]
    kinds = [kind_of(x) for x in pair]
    if name == "div":
        if bound.get("rounding_mode") is not None:
            need_no_sum("a rounded quotient", kinds)
        if isinstance(bound["other"], Tensor):
            need_no_sum("a quotient by a value that is", [kind_of(bound["other"])])
    return Kind(_one_sum(name, kinds), _aligned(name, pair, kinds, out))


def _one_sum(name: str, kinds: Sequence[Kind]) -> frozenset[str]:
    """The axes over which a product is a partial sum; no axis in two factors."""
    seen: frozenset[str] = frozenset()
    for kind in kinds:
        if twice := seen & kind.partial:
            raise NotLinear(
                f"{name} of two partial sums over {listed(twice)}: a product of terms is not a term of the product. Sum one "
                f"of them first, with leaf.psum(x, {quoted(twice)})."
            )
        seen |= kind.partial
    if mixed := seen & frozenset().union(*(kind.axes for kind in kinds)):
        raise NotLinear(f"{name} of a partial sum over {listed(mixed)} and a value that is cut along it.")
    return seen


def _sum(name: str, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
    """Sums of values: all are terms of sums over the same axes."""
    pair = [bound.get("self"), bound.get("other")]
    tensors = [x for x in pair if isinstance(x, Tensor)]
    kinds = [kind_of(x) for x in tensors]
    partial = kinds[0].partial
    if any(kind.partial != partial for kind in kinds) or (partial and len(tensors) < 2):
        owed = frozenset().union(*(kind.partial for kind in kinds))
        raise NotLinear(
            f"{name} of a partial sum over {listed(owed)} and a value that is not one: the sum over the ranks would count that "
            f"value once a rank. Sum first, with leaf.psum(x, {quoted(owed)})."
        )
    return Kind(partial, _aligned(name, tensors, kinds, out))


def _keep(name: str, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
    """The same numbers, or all of them times the same number."""
    return kind_of(bound["self"])


def _moved(move: Callable[[Bound, int, Tensor], int | None]) -> Callable[..., Kind]:
    """Operations that only rename dims, given where a dim goes (None: its blocks would be mixed)."""

    def rule(name: str, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
        kind, cut = kind_of(bound["self"]), set()
        for x in (x for key, x in bound.items() if key != "self" and isinstance(x, Tensor) and kind_of(x) != WHOLE):
            raise NotLinear(f"{name} by indices that are {kind_of(x)}. Make them whole first.")
        if out.dtype != bound["self"].dtype:
            need_no_sum(f"{name}, to {out.dtype},", [kind])
        for axis, dim in kind.cut:
            there = move(bound, dim, out)
            if there is None:
                raise NotLinear(
                    f"{name} of a value that is cut along {axis} in dim {dim} mixes its blocks; act on other dims, or make the "
                    f"value whole with leaf.all_gather(x, {axis!r}, {dim})."
                )
            cut.add((axis, there))
        return Kind(kind.partial, frozenset(cut))

    return rule


def _transpose(bound: Bound, dim: int, out: Tensor) -> int:
    a, b = (bound["dim0"] % out.ndim, bound["dim1"] % out.ndim) if "dim0" in bound else (0, out.ndim - 1)
    return {a: b, b: a}.get(dim, dim)


def _permute(bound: Bound, dim: int, out: Tensor) -> int:
    return [d % out.ndim for d in bound["dims"]].index(dim)


def _unsqueeze(bound: Bound, dim: int, out: Tensor) -> int:
    return dim + (dim >= bound["dim"] % out.ndim)


def _squeeze(bound: Bound, dim: int, out: Tensor) -> int | None:
    x = bound["self"]
    dims = bound.get("dim", range(x.ndim))
    gone = [d % x.ndim for d in ([dims] if isinstance(dims, int) else dims) if x.shape[d] == 1]
    return None if dim in gone else dim - sum(d < dim for d in gone)


def _expand(bound: Bound, dim: int, out: Tensor) -> int:
    return dim + out.ndim - bound["self"].ndim


def _elsewhere(bound: Bound, dim: int, out: Tensor) -> int | None:
    """Operations along one dim that keep all dims."""
    x = bound["self"]
    dims = bound["dims"] if "dims" in bound else [bound.get("dim", 0)]
    # A roll without dims is one of all entries in a row; a flip without dims does nothing.
    mixed = not dims and "shifts" in bound
    return None if mixed or dim in [d % x.ndim for d in dims] else dim


def _select(bound: Bound, dim: int, out: Tensor) -> int | None:
    taken = bound.get("dim", 0) % bound["self"].ndim
    return None if dim == taken else dim - (dim > taken)


def _view(bound: Bound, dim: int, out: Tensor) -> int | None:
    """A cut dim stays one where it is the outermost of the dims that it is joined with."""
    before, after = list(bound["self"].shape), list(out.shape)
    if before == after:
        return dim
    if prod(before) == 0 or before[dim] == 1:
        return None  # beside others of one entry nobody can tell which of them the block is a part of
    at = prod(before[:dim])
    return next((i for i, n in enumerate(after) if n > 1 and prod(after[:i]) == at), None)


def _reduce(name: str, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
    """Reductions over dims. A sum over a cut dim is a partial sum over its axis; others need the dim whole."""
    x = bound["self"]
    kind, cut, partial = kind_of(x), set(), set()
    dims = bound.get("dim")
    gone = (
        range(x.ndim)
        if dims is None or dims == []
        else [d % max(x.ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)]
    )
    if name not in ("sum", "mean"):
        need_no_sum(name, [kind])
    for axis, dim in kind.cut:
        if dim not in gone:
            cut.add((axis, dim if bound.get("keepdim") else dim - sum(d < dim for d in gone)))
        elif name == "sum":
            partial.add(axis)
        else:
            raise NotLinear(
                f"{name} over dim {dim}, of which every rank of {axis} has a block: each would get another result. "
                + _INSTEAD[name].format(dim=dim, axis=axis)
            )
    return Kind(kind.partial | partial, frozenset(cut))


_INSTEAD = {
    "mean": "Take leaf.psum(x.sum({dim}), {axis!r}) and divide it by the size in leaf.shape.",
    "amax": "leaf.amax(x) is the largest entry of the whole.",
    "amin": "-leaf.amax(-x) is the smallest entry of the whole.",
    "linalg_vector_norm": "leaf.norm(x) is the norm of the whole; else take leaf.psum(x.square().sum({dim}), {axis!r}).sqrt().",
}
"""What to write for a reduction that needs its dim whole."""


def _product(left: str, right: str, to: str) -> Callable[..., Kind]:
    """A product of matrices, by the letters of its dims."""

    def rule(name: str, bound: Bound, kind_of: KindOf, out: Tensor) -> Kind:
        a, b = (x for x in bound.values() if isinstance(x, Tensor))
        kinds = [kind_of(a), kind_of(b)]
        partial = _one_sum(name, kinds)
        letters = [
            {(axis, word[dim]) for axis, dim in kind.cut} for kind, word in zip(kinds, (left, right), strict=True)
        ]
        for axis, letter in letters[0] ^ letters[1]:
            if letter in left and letter in right:
                raise NotLinear(
                    f"{name} over a dim of which one factor has a block along {axis}, the other all or another part. Cut both "
                    "alike."
                )
        cut = {(axis, to.index(letter)) for axis, letter in letters[0] | letters[1] if letter in to}
        if len({axis for axis, _ in cut}) < len(cut):
            raise NotLinear(f"{name} of two values that are cut along the same axis in different dims.")
        partial |= {axis for axis, letter in letters[0] & letters[1] if letter not in to}
        return Kind(partial, frozenset(cut))

    return rule


_RULES: Mapping[str, Callable[..., Kind]] = {
    **dict.fromkeys(("mul", "div"), _scale),
    **dict.fromkeys(("add", "sub"), _sum),
    **dict.fromkeys(("neg", "clone", "_to_copy", "alias", "detach", "lift_fresh"), _keep),
    **dict.fromkeys(("t", "transpose"), _moved(_transpose)),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _moved(_view)),
    **dict.fromkeys(("slice", "flip", "roll", "index_select", "narrow"), _moved(_elsewhere)),
    "permute": _moved(_permute),
    "unsqueeze": _moved(_unsqueeze),
    "squeeze": _moved(_squeeze),
    "expand": _moved(_expand),
    "select": _moved(_select),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "linalg_vector_norm"), _reduce),
    "mm": _product("ik", "kj", "ij"),
    "mv": _product("ik", "k", "i"),
    "dot": _product("k", "k", ""),
    "bmm": _product("bik", "bkj", "bij"),
}
