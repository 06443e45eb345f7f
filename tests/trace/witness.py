"""spmd-types as a second witness: the same layer functions under another type checker, which knows nothing of ours.

Its types along an axis say what the cotangent is, too. Ours in its words: the same on every rank, with a whole cotangent: I;
what went through ``pvary``, and a leaf that owes the axis: R, whose cotangent is partial; what differs: V.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functional_par as fp
from functional_par import tree
from functional_par.model import LOSS, Model
from functional_par.par import Par, TensorParallelMode, merge_axes, row_count
from functional_par.plan import Plan
from functional_par.random import key as make_key
from tests.trace.free import SineTimes
from tests.trace.joint import piece, share

WITHOUT = "the second witness is optional: pip install 'functional_par[witness]'"

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    spmd = pytest.importorskip("spmd_types", reason=WITHOUT)
    from spmd_types.checker import typecheck
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

spmd.register_local_autograd_function(SineTimes)

I, R, V, P, S = spmd.I, spmd.R, spmd.V, spmd.P, spmd.S  # noqa: E741

MOST = 64
"""Assignments of types to leaves that are tried before a program counts as refused."""


@contextmanager
def ranks_of(mesh: fp.Mesh) -> Iterator[dict[str, Any]]:
    """Axis name to group, of ranks that never answer: the checker looks at types, and shapes come out right."""
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(backend="fake", rank=0, world_size=mesh.size, store=FakeStore())
        try:
            device = init_device_mesh("cpu", tuple(mesh.sizes[axis] for axis in axes), mesh_dim_names=tuple(axes))
            with spmd.set_current_mesh(device):
                yield {axis: device.get_group(axis) for axis in axes}
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class WitnessPar(Par):
    """Collectives of spmd-types, which take contiguous tensors. An axis without a group has one rank and no type."""

    mesh: fp.Mesh
    groups: Mapping[str, Any]
    batch: Mapping[str, Tensor] = field(default_factory=dict)
    mode: TensorParallelMode = TensorParallelMode.ALL_REDUCE
    async_comm: bool = False
    key: Any = field(default_factory=lambda: make_key(0))
    data: tuple[str, ...] = ()

    @property
    def layer_key(self) -> Any:
        return self.key

    @property
    def rows(self) -> Tensor:
        return self._typed(torch.arange(row_count(self)), dict.fromkeys(self.data, V))

    def size(self, axis: str) -> int:
        return self.mesh.sizes[merge_axes((axis,))[0]]

    def axis_index(self, axis: str) -> Tensor:
        return self._typed(torch.arange(1).sum(), {axis: V})

    def _typed(self, x: Tensor, given: Mapping[str, Any]) -> Tensor:
        with spmd.no_typecheck():
            x = x.clone()
        return spmd.assert_type(x, {self.groups[a]: given.get(a, I) for a in self.groups})

    def _real(self, axes: tuple[str, ...]) -> list[Any]:
        return [self.groups[axis] for axis in merge_axes(axes) if axis in self.groups]

    def psum(self, x: Tensor, *axes: str) -> Tensor:
        for group in self._real(axes):
            x = spmd.all_reduce(x.contiguous(), group, src=P, dst=I)
        return x

    def pmax(self, x: Tensor, *axes: str) -> Tensor:
        # Its collectives only add; the types of a maximum are those of a sum.
        return self.psum(x.detach(), *axes)

    def pvary(self, x: Tensor, *axes: str) -> Tensor:
        for group in self._real(axes):
            x = spmd.convert(x, group, src=I, dst=R)
        return x

    def all_gather(self, x: Tensor, axis: str, dim: int, to: str = "varying") -> Tensor:
        for group in self._real((axis,)):
            x = spmd.all_gather(x.contiguous(), group, src=S(dim % x.ndim), dst=I if to == "replicated" else R)
        return x

    def slice(self, x: Tensor, axis: str, dim: int) -> Tensor:
        for group in self._real((axis,)):
            x = spmd.convert(x, group, src=I, dst=S(dim % x.ndim))
        return x

    def take(self, x: Tensor, axis: str, dim: int, starts: tuple[int, ...], length: int) -> Tensor:
        # A window is a product with a mask of the rank's own.
        return (
            x.narrow(dim, 0, length) * (self.axis_index(axis) + 1) if axis in self.groups else x.narrow(dim, 0, length)
        )

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        for group in self._real((axis,)):
            x = spmd.reduce_scatter(x.contiguous(), group, src=P, dst=S(dim % x.ndim))
        return x

    def all_to_all(self, x: Tensor, axis: str, split: int, concat: int) -> Tensor:
        for group in self._real((axis,)):
            x = spmd.all_to_all(x.contiguous(), group, src=S(concat % x.ndim), dst=S(split % x.ndim))
        return x

    def ppermute(self, x: Tensor, axis: str, to: tuple[int, ...]) -> Tensor:
        # It has none: an exchange within a dim of that many entries has the same types.
        for group in self._real((axis,)):
            n = self.size(axis)
            many = x.unsqueeze(0).expand(n, *x.shape)
            x = spmd.all_to_all(many.contiguous(), group, src=S(0), dst=S(0))[0]
        return x

    def kernel(self, definition: Any, fast: Any) -> Any:
        return definition

    def check_stream(self, x: Tensor, what: str) -> None:
        pass

    def group(self, axis: str) -> Any:
        raise RuntimeError("the witness has no groups")


def refusal(
    model: Model, plan: Plan, batch: Mapping[str, Tensor], owes: Mapping[str, frozenset[str]], groups: Any
) -> str:
    """What spmd-types has against a model whose leaves owe these axes; "" for nothing."""
    try:
        with warnings.catch_warnings(), typecheck(strict_mode="strict"):
            warnings.simplefilter("ignore")
            _run(model, plan, batch, owes, groups)
    except spmd.SpmdTypeError as error:
        return str(error)
    return ""


def _run(
    model: Model, plan: Plan, batch: Mapping[str, Tensor], owes: Mapping[str, frozenset[str]], groups: Mapping[str, Any]
) -> None:
    leaves = {}
    with spmd.no_typecheck():
        whole = tree.flatten(model.init(0, torch.float64))
        pieces = {path: piece(plan, plan.specs[path], x, 0).clone() for path, x in whole.items()}
    for path, x in pieces.items():
        # Without a gradient its rules pass whatever comes.
        x.requires_grad_(model.leaves[path].trainable)
        kinds = {a: V if a in plan.specs[path].axes else R if a in owes[path] else I for a in groups}
        leaves[path] = spmd.assert_type(x, {groups[a]: kind for a, kind in kinds.items()})
    with spmd.no_typecheck():
        rows = {name: x.clone() for name, x in share(plan, batch, 0)[0].items()}
    for x in rows.values():
        spmd.assert_type(x, {groups[a]: V if a in plan.data_axes else I for a in groups})
    par = WitnessPar(plan.mesh, groups, rows, plan.mode, data=tuple(a for a in plan.data_axes if a in groups))
    out: Any = rows
    for layer in model.layers:
        out = layer.fn(layer.select(leaves), out, par)
    loss = model.loss.fn(model.loss.select(leaves), out, par)[0]
    _check_loss(loss, plan, groups)


def _check_loss(loss: Tensor, plan: Plan, groups: Mapping[str, Any]) -> None:
    """Whole along every axis but the data axes, along which the step adds it up."""
    found = spmd.get_local_type(loss)
    for axis, group in groups.items():
        kind = found[spmd.normalize_axis(group)]
        if (kind is I) == (axis in plan.data_axes):
            raise spmd.SpmdTypeError(f"the {LOSS} is {kind} along {axis}")


def always_refused(
    make: Callable[[], Model], plan: Plan, batch: Mapping[str, Tensor], groups: Mapping[str, Any]
) -> str:
    """What spmd-types has against a model, made anew for each try, whatever its leaves owe; "" if it takes some assignment."""
    free = [
        (path, axis) for path, spec in plan.specs.items() for axis in groups if spec.trainable and axis not in spec.axes
    ]
    # Data axes are owed by nearly all leaves, so they change last.
    free.sort(key=lambda entry: entry[1] not in plan.data_axes)
    choices = product(*((True, False) if axis in plan.data_axes else (False, True) for _, axis in free))
    last = "nothing was tried"
    for choice in islice(choices, MOST):
        owes: dict[str, frozenset[str]] = {path: frozenset() for path in plan.specs}
        for (path, axis), owed in zip(free, choice, strict=True):
            owes[path] = owes[path] | {axis} if owed else owes[path]
        last = refusal(make(), plan, batch, owes, groups)
        if not last:
            return ""
    return last
