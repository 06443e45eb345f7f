"""Runs every map once on meta tensors, leaf by leaf: what it sums is paid, what it does to a partial sum has to be linear.
It communicates nothing and knows no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_par.errors import MeshError, MissingCollective, ModelError, ParallelError
from functional_par.maps.both import Both
from functional_par.maps.follow import Following, TraceLeaf
from functional_par.maps.leaf import extent
from functional_par.maps.types import Kind, NotLinear, listed, quoted
from functional_par.mesh import AXES, Mesh
from functional_par.spec import Spec
from functional_par.trace.place import Place

if TYPE_CHECKING:
    from functional_par.maps.gradient_map import GradientMap


@dataclass(frozen=True)
class Mapped:
    """What maps do to the specs of a plan.

    Attributes:
        specs: with the payer of each debt that a map pays.
        groups: (axes, owners) of the collectives of all maps.
    """

    specs: Mapping[str, Spec]
    groups: frozenset[tuple[tuple[str, ...], tuple[int, ...]]]


def infer(maps: Sequence[GradientMap], specs: Mapping[str, Spec], mesh: Mesh) -> Mapped:
    """Follow all maps on all leaves.

    Raises:
        MissingCollective: an operation on a partial sum that is not linear in it.
        SuperfluousCollective: a sum that nobody owes, or that was paid already.
        ModelError: a map that is no pure function from a tensor to one of the same shape and dtype.
    """
    done, groups = dict(specs), set()
    known: dict[Any, _Used] = {}
    for path, spec in specs.items():
        for each in (each for each in maps if spec.trainable and each.acts_on(path)):
            used = _follow_once(each, done[path], mesh, known)
            debts = [replace(debt, payer=each.name) if debt.axis in used.paid else debt for debt in done[path].owes]
            done[path] = replace(done[path], owes=tuple(debts))
            groups |= {(axes, spec.owners) for axes in used.axes}
    return Mapped(done, frozenset(groups))


@dataclass(frozen=True)
class _Used:
    """The axes whose sums a map has paid, those of its collectives, and whether it asked which leaf it is."""

    paid: frozenset[str]
    axes: frozenset[tuple[str, ...]]
    asked: bool


class _Watched(Spec):
    """A spec that knows whether its path was read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "path":
            object.__setattr__(self, "asked", True)
        return object.__getattribute__(self, name)


def _watched(spec: Spec) -> Any:
    watched = _Watched(**{each.name: getattr(spec, each.name) for each in fields(Spec)})
    object.__setattr__(watched, "asked", False)
    return watched


def _follow_once(each: GradientMap, spec: Spec, mesh: Mesh, known: dict[Any, _Used]) -> _Used:
    """Leaves that differ in their path alone are followed once by a map that does not ask for it."""
    key = each.name, replace(spec, path="", owes=()), tuple((debt.axis, debt.payer) for debt in spec.owes)
    if key not in known or known[key].asked:
        known[key] = _follow(each, spec, mesh)
    return known[key]


def _follow(each: GradientMap, spec: Spec, mesh: Mesh) -> _Used:
    """One map on one leaf: on the whole of it, then on a shard, which must be the same but for sizes. On a mesh that does not
    cut it, on a shard of two.
    """
    whole = Following()
    used = _follow_on(each, spec, replace(mesh, **dict.fromkeys(spec.sharded, 1)), whole)
    if spec.sharded:
        mesh = replace(mesh, **{axis: _parts(spec, axis, mesh) for axis in spec.sharded})
        both = Both(whole.done, {axis: extent(spec, axis, getattr(mesh, axis)) for axis in spec.sharded})
        cut = _follow_on(each, spec, mesh, Following(both))
        used = replace(cut, asked=cut.asked or used.asked)
    return used


def _parts(spec: Spec, axis: str, mesh: Mesh) -> int:
    """In how many shards a dim is cut here: so few that each has more than one entry, of which torch makes exceptions."""
    return max(2, min(getattr(mesh, axis), extent(spec, axis, 1)[0] - 1))


def _follow_on(each: GradientMap, spec: Spec, mesh: Mesh, typing: Following) -> _Used:
    dtype = torch.float32
    shape = spec.local_shape(mesh)
    cut = frozenset((axis, dim) for dim, axis in enumerate(spec.axes) if axis)
    owes = spec.pending if each.phase == "local" else ()
    grad = typing.note(torch.empty(shape, dtype=dtype, device="meta"), Kind(frozenset(owes), cut))
    param = typing.note(torch.empty(shape, dtype=dtype, device="meta"), Kind(cut=cut))

    def size(axis: str) -> int:
        if axis not in AXES:
            raise MeshError(f"a sum over {axis!r}: the axes are {', '.join(AXES)}.")
        return getattr(mesh, axis)

    watched = _watched(spec)
    leaf = TraceLeaf(typing, watched, owes, param, size, dtype)
    out = _call(each, typing, grad, leaf)
    paid = _check_result(each, spec, grad, Kind(frozenset(owes), cut), out, typing)
    return _Used(paid, frozenset(leaf.used), watched.asked)


def _call(each: GradientMap, typing: Following, grad: Tensor, leaf: TraceLeaf) -> Any:
    try:
        with torch.no_grad(), torch.device("meta"), typing:
            out = each.function(grad, leaf)
        if typing.both:
            typing.both.end()
        return out
    except NotLinear as error:
        raise MissingCollective(f"{_where(each, leaf.path, error)}: {error}") from None
    except ParallelError as error:
        raise type(error)(f"{_where(each, leaf.path, error)}: {error}") from None
    except Exception as error:
        hint = (
            " The function runs on tensors without data: no Python number may be taken from one; use torch.where and the like."
            if "meta" in str(error).lower() or "_local_scalar_dense" in str(error)
            else ""
        )
        raise ModelError(
            f"{_where(each, leaf.path, error)}: it failed while it was followed: {type(error).__name__}: {error}.{hint}"
        ) from error


def _check_result(
    each: GradientMap, spec: Spec, grad: Tensor, before: Kind, out: Any, typing: Following
) -> frozenset[str]:
    """The axes whose sums the map has paid."""
    where = _where(each, spec.path)
    if not isinstance(out, Tensor) or out.shape != grad.shape or out.dtype != grad.dtype:
        shown = f"{out.dtype}{list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise ModelError(
            f"{where}: it returns {shown} for a shard of {grad.dtype}{list(grad.shape)}. It gives a tensor of the shape and "
            "dtype that it gets: x.to(grad.dtype)."
        )
    kind = typing.kind(out)
    if more := kind.partial - before.partial:
        raise MissingCollective(
            f"{where}: it returns {kind}. Nobody adds up that sum over {listed(more)} afterwards: "
            f"leaf.psum(x, {quoted(more)})."
        )
    if kind.cut != before.cut:
        raise ModelError(
            f"{where}: it returns a value that is {kind} for a leaf that is {Kind(cut=before.cut)} ({spec}); every rank has "
            "to return its own block."
        )
    return before.partial - kind.partial


def _where(each: GradientMap, path: str, error: BaseException | None = None) -> str:
    place = (Place.of_exception(error) if error else None) or Place.of_function(each.function)
    return f"{each.name} on {path}" + (f", {place}" if place else "")
