"""Bytes that a rank puts on the wire in torch's own calls, seen by a dispatch mode on top of c10d."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHARES: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all_reduce": lambda n: 2 * (n - 1) / n,
        "all_gather": lambda n: n - 1,
        "reduce_scatter": lambda n: (n - 1) / n,
        "all_to_all": lambda n: (n - 1) / n,
        "send": lambda n: 1,
        "nothing": lambda n: 0,
    }
)
"""What a rank of ``n`` sends at least, as a multiple of its input."""

CALLS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "c10d.allreduce_": ("all_reduce", 0),
        "c10d._allgather_base_": ("all_gather", 1),
        "c10d.allgather_": ("all_gather", 1),
        "c10d.allgather_into_tensor_coalesced_": ("all_gather", 1),
        "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d.reduce_scatter_": ("reduce_scatter", 1),
        "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
        "c10d.alltoall_base_": ("all_to_all", 1),
        "c10d.send": ("send", 0),
        "c10d.recv_": ("nothing", 0),
        "_c10d_functional.all_reduce": ("all_reduce", 0),
        "_c10d_functional.all_reduce_": ("all_reduce", 0),
        "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
        "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
        "_c10d_functional.all_to_all_single": ("all_to_all", 0),
        "_c10d_functional.wait_tensor": ("nothing", 0),
        "_c10d_functional._wrap_tensor_autograd": ("nothing", 0),
    }
)
"""The kind of each call, and which of its arguments is the input."""


class Wire(TorchDispatchMode):
    """Adds up what collectives and sends put on the wire, by the known minimum of each, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor's own rule first: its collectives come here then
        if func.namespace in ("c10d", "_c10d_functional"):
            self._add(str(func).removesuffix(".default"), args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in CALLS:
            self.unknown.add(name)
            return
        kind, place = CALLS[name]
        payload = sum(x.nbytes for x in tree_leaves(args[place]) if isinstance(x, Tensor))
        self.sent += SHARES[kind](_size(args) if kind != "nothing" else 1) * payload


def _size(args: tuple[Any, ...]) -> int:
    """Ranks of the group that is among the arguments: the last name for functional calls, else a boxed object."""
    names = [each for each in args if isinstance(each, str)]
    if names:
        return dist.distributed_c10d._resolve_process_group(names[-1]).size()
    boxed = next(each for each in args if hasattr(each, "_type") and "ProcessGroup" in str(each._type()))
    return dist.ProcessGroup.unbox(boxed).size()


def sent_by(step: Callable[[], object]) -> int | None:
    """Bytes that this rank sends in a step; None if the step makes a call that is not known here."""
    with Wire() as wire:
        step()
    return None if wire.unknown else round(wire.sent)
