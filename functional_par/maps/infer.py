"""Runs every map once on meta tensors, leaf by leaf: what it sums is paid, what it does to a partial sum has to be linear.
It communicates nothing and knows no rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from functional_par.errors import MeshError, MissingCollective, ModelError, ParallelError
from functional_par.maps.follow import Following, TraceLeaf
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
        groups: (axes, stages) of the collectives of all maps.
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
    for path, spec in specs.items():
        for each in (each for each in maps if spec.trainable and each.acts_on(path)):
            used = _follow(each, done[path], mesh)
            done[path] = used.spec
            groups |= {(axes, spec.stages) for axes in used.axes}
    return Mapped(done, frozenset(groups))


@dataclass(frozen=True)
class _Used:
    spec: Spec
    axes: set[tuple[str, ...]]


def _follow(each: GradientMap, spec: Spec, mesh: Mesh) -> _Used:
    """One map on one leaf."""
    dtype, typing = torch.float32, Following()
    shape = spec.local_shape(mesh)
    cut = frozenset((axis, dim) for dim, axis in enumerate(spec.axes) if axis)
    owes = spec.pending if each.phase == "local" else ()
    grad = typing.note(torch.empty(shape, dtype=dtype, device="meta"), Kind(frozenset(owes), cut))
    param = typing.note(torch.empty(shape, dtype=dtype, device="meta"), Kind(cut=cut))

    def size(axis: str) -> int:
        if axis not in AXES:
            raise MeshError(f"a sum over {axis!r}: the axes are {', '.join(AXES)}.")
        return getattr(mesh, axis)

    leaf = TraceLeaf(typing, spec, owes, param, size, dtype)
    out = _call(each, typing, grad, leaf)
    paid = _check_result(each, spec, grad, Kind(frozenset(owes), cut), out, typing)
    debts = tuple(replace(debt, payer=each.name) if debt.axis in paid else debt for debt in spec.owes)
    return _Used(replace(spec, owes=debts), leaf.used)


def _call(each: GradientMap, typing: Following, grad: Tensor, leaf: TraceLeaf) -> Any:
    try:
        with torch.no_grad(), torch.device("meta"), typing:
            return each.function(grad, leaf)
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
    place = Place.of_exception(error) if error else Place.of_function(each.function)
    return f"{each.name} on {path}" + (f", {place}" if place else "")
