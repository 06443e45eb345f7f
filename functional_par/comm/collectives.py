"""Differentiable collectives over a group. Each is a linear map that knows its dual, and the pullback applies the dual.

Duals are taken in the inner product of the types: a varying value is summed over the ranks, a replicated one counts
once. Nothing here knows axis names (``par`` does) or backends, and nothing ever modifies an input.

They work under ``torch.func.vjp``, ``grad``, ``vmap`` and ``jvp``, nested as one likes, and under plain autograd. (torch
keeps the level of forward-mode AD in the process, so ranks that are threads cannot each enter ``jvp`` by themselves.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from functional_par.comm import linear_maps
from functional_par.comm.base import AllReduce, Group
from functional_par.comm.linear_maps import LinearMap
from functional_par.errors import ModelError
from functional_par.kernel import Kernel


def psum(x: Tensor, group: Group) -> Tensor:
    """Sum of ``x`` over the ranks. ``varying -> replicated``; dual: ``pvary``."""
    return _apply(x, linear_maps.Sum(group))


def pmax(x: Tensor, group: Group) -> Tensor:
    """Elementwise maximum of ``x`` over the ranks, a constant to differentiation. ``varying -> replicated``."""
    return _Max.apply(x.detach(), group)


def pvary(x: Tensor, group: Group) -> Tensor:
    """``x`` itself. ``replicated -> varying``; dual: ``psum``."""
    return _apply(x, linear_maps.Vary(group))


def all_gather(x: Tensor, group: Group, dim: int, to: Literal["varying", "replicated"] = "varying") -> Tensor:
    """Concatenation of ``x`` of all ranks along ``dim``. ``varying -> to``; dual: ``reduce_scatter``, or ``slice``
    for ``to="replicated"``.

    Raises:
        ModelError: for another ``to``, or a dim that ``x`` does not have.
    """
    if to not in ("varying", "replicated"):
        raise ModelError(f"all_gather over {group.label} to {to!r}: its result is 'varying' or 'replicated'.")
    return _apply(x, linear_maps.Gather(group, _dim("all_gather", x, group, dim), to == "replicated"))


def slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's equal chunk of ``x`` along ``dim``. ``replicated -> varying``; dual: ``all_gather`` to replicated.

    Raises:
        ModelError: if the group does not divide the dim.
    """
    return _apply(x, linear_maps.Slice(group, _chunked("slice", x, group, dim)))


def take(x: Tensor, group: Group, dim: int, starts: Sequence[int], length: int) -> Tensor:
    """``x[starts[i] : starts[i] + length]`` along ``dim`` on rank ``i``. Dual: the window placed in zeros.

    Raises:
        ModelError: if there is not one start a rank, or a window leaves the dim.
    """
    dim = _dim("take", x, group, dim)
    full = x.shape[dim]
    if len(starts) != group.size:
        raise ModelError(f"take over {group.label}: {len(starts)} starts for {group.size} ranks; give one each.")
    if length < 0 or min(starts) < 0 or max(starts) + length > full:
        raise ModelError(
            f"take over {group.label}: windows of {length} that start at {tuple(starts)} leave dim {dim} "
            f"of {list(x.shape)}, which has {full} entries."
        )
    return _apply(x, linear_maps.Take(group, dim, starts[group.index], length, full))


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's equal chunk along ``dim`` of the sum over the ranks. ``varying -> varying``; dual: ``all_gather``.

    Raises:
        ModelError: if the group does not divide the dim.
    """
    return _apply(x, linear_maps.Scatter(group, _chunked("reduce_scatter", x, group, dim)))


def all_to_all(x: Tensor, group: Group, split: int, concat: int) -> Tensor:
    """Chunk ``j`` along ``split`` goes to rank ``j``, what arrives is concatenated along ``concat``.
    ``varying -> varying``; dual: the same with the dims exchanged.

    Raises:
        ModelError: if the group does not divide the split dim.
    """
    split = _chunked("all_to_all", x, group, split)
    return _apply(x, linear_maps.Exchange(group, split, _dim("all_to_all", x, group, concat)))


def ppermute(x: Tensor, group: Group, to: Sequence[int]) -> Tensor:
    """Rank ``i`` sends ``x`` to rank ``to[i]`` of the group. ``varying -> varying``; dual: the inverse permutation.

    Raises:
        ModelError: if ``to`` is not a permutation of the group's indices.
    """
    if sorted(to) != list(range(group.size)):
        raise ModelError(f"ppermute over {group.label} to {tuple(to)}: not a permutation of 0 to {group.size - 1}.")
    return _apply(x, linear_maps.Permutation(group, tuple(to)))


def _dim(name: str, x: Tensor, group: Group, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise ModelError(f"{name} over {group.label}: dim {dim} of a tensor of shape {list(x.shape)}.")
    return dim % x.ndim


def _chunked(name: str, x: Tensor, group: Group, dim: int) -> int:
    dim = _dim(name, x, group, dim)
    if x.shape[dim] % group.size:
        raise ModelError(
            f"{name} over {group.label}: dim {dim} of {list(x.shape)} has {x.shape[dim]} entries, which {group.size} "
            f"ranks do not divide. Choose a size that is a multiple of {group.size}, or pad it."
        )
    return dim


class _Linear(Kernel):
    """Applies a map; both derivatives apply one again, so every order of differentiation is covered."""

    @staticmethod
    def forward(x: Tensor, linear: LinearMap) -> Tensor:
        return linear.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, LinearMap], output: Tensor) -> None:
        ctx.linear = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _apply(cotangent, ctx.linear.dual()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return _apply(tangent, ctx.linear)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, linear: LinearMap) -> tuple[Tensor, int]:
        return _apply(x.movedim(in_dims[0], 0), linear.batched()), 0


def _apply(x: Tensor, linear: LinearMap) -> Tensor:
    return _Linear.apply(x, linear)


class _Max(Kernel):
    """The maximum over the ranks, whose derivative is declared to be nothing."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return group.start(AllReduce("max"), x).wait()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Group], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, group: Group) -> tuple[Tensor, int]:
        return _Max.apply(x.movedim(in_dims[0], 0), group), 0
