"""Clipping by the global norm and fused AdamW over parameters that are tensors or DTensors of several meshes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .setting import BETAS, CLIP, EPS, LR, WEIGHT_DECAY


class Optimizer:
    """What follows backward. Torch's functions take no mix of tensors and DTensors, nor of meshes: each kind is a group."""

    def __init__(self, modules: Iterable[nn.Module], mesh: DeviceMesh, sum_over_dp: bool) -> None:
        kinds: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
        for module in modules:
            for parameter in module.parameters():
                kinds[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
        self._kinds = list(kinds.values())
        self._optimizer = torch.optim.AdamW(
            [{"params": params} for params in self._kinds], LR, BETAS, EPS, WEIGHT_DECAY, fused=True
        )
        self._dp = mesh.get_group("dp") if sum_over_dp else None
        self._pp = mesh.get_group("pp") if mesh["pp"].size() > 1 else None

    @torch.no_grad()
    def step(self) -> None:
        """Clip, move the parameters, and forget the gradients."""
        if self._dp is not None:
            self._average()
        square = torch.zeros(())
        for params in self._kinds:
            norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], foreach=True)
            square += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
        if self._pp is not None:
            dist.all_reduce(square, group=self._pp)
        for params in self._kinds:
            torch.nn.utils.clip_grads_with_norm_(params, CLIP, square.sqrt(), foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _average(self) -> None:
        """The mean of all gradients over dp, in one all-reduce of a flat copy."""
        grads = [p.grad for params in self._kinds for p in params if p.grad is not None]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        flat = torch.cat([grad.flatten() for grad in local])
        dist.all_reduce(flat, group=self._dp)
        flat /= dist.get_world_size(self._dp)
        torch._foreach_copy_([grad.view(-1) for grad in local], list(flat.split([grad.numel() for grad in local])))
