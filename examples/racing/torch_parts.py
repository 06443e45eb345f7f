"""Torch's own parts for the same model: DTensor tensor parallelism, pipelining, DDP and FSDP2, alone and together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from .models import Llama, batch_of, mean_loss, weights_of, with_our_weights
from .setting import Job
from .torch_optimizer import Optimizer
from .torch_pipeline import pipeline
from .torch_tensor import shard
from .torch_wire import sent_by
from .worker import Serve


def main(job: Job, serve: Serve) -> None:
    """Options: ``tp`` (plain or sp), ``loss_parallel``, ``pp`` (a schedule), ``split`` (blocks of each stage), ``dp`` (ddp,
    fsdp2 or allreduce)."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (job.axis("dp"), job.axis("pp"), job.axis("tp")), mesh_dim_names=("dp", "pp", "tp"))
    rows = {name: x.chunk(job.axis("dp"))[mesh.get_local_rank("dp")] for name, x in batch_of(job.sizes).items()}
    backward, modules = (_pipelined if job.axis("pp") > 1 else _whole)(job, mesh, rows)
    optimizer = Optimizer(modules, mesh, sum_over_dp=job.options.get("dp") == "allreduce")
    around = loss_parallel if job.options.get("loss_parallel") else contextlib.nullcontext

    def step() -> float | None:
        with around():
            loss = backward()
        optimizer.step()
        return loss

    serve(step, lambda: sent_by(step))
    dist.destroy_process_group()


Backward = Callable[[], float | None]


def _whole(job: Job, mesh: DeviceMesh, rows: dict[str, Tensor]) -> tuple[Backward, list[nn.Module]]:
    """Forward and backward of the whole model, or of this rank's part of it."""
    model = _parallel(job, mesh, Llama(job.sizes, range(job.sizes["n_layers"])), weights_of(job.sizes))

    def backward() -> float:
        loss = mean_loss(model(rows["tokens"]), rows["labels"])
        loss.backward()
        return loss.item()

    return backward, [model]


def _pipelined(job: Job, mesh: DeviceMesh, rows: dict[str, Tensor]) -> tuple[Backward, list[nn.Module]]:
    """Forward and backward of this rank's stages under torch's schedule."""
    weights = weights_of(job.sizes)
    schedule, stages = pipeline(job, mesh, lambda module: _parallel(job, mesh, module, weights))
    given = [rows["tokens"]] if any(stage.is_first for stage in stages) else []
    last = any(stage.is_last for stage in stages)

    def backward() -> float | None:
        losses: list[Tensor] = []
        known: dict[str, Any] = {"target": rows["labels"], "losses": losses} if last else {}
        schedule.step(*given, return_outputs=False, **known)
        return torch.stack(losses).mean().item() if last else None

    return backward, [stage.submod for stage in stages]


def _parallel(job: Job, mesh: DeviceMesh, module: Llama, weights: dict[str, Tensor]) -> nn.Module:
    """The module with our weights, over tp and dp as the options say."""
    with_our_weights(module, weights)
    if job.axis("tp") > 1:
        shard(module, mesh["tp"], job.options["tp"], bool(job.options.get("loss_parallel")))
    if job.options.get("dp") == "fsdp2":
        for part in (*module.blocks.values(), module):
            fully_shard(part, mesh=mesh["dp"])
    if job.options.get("dp") == "ddp":
        return DistributedDataParallel(
            module, process_group=mesh.get_group("dp"), gradient_as_bucket_view=True, broadcast_buffers=False
        )
    return module
