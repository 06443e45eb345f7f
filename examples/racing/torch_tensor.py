"""Tensor parallelism of the module by DTensor, as torch's tutorial and torchtitan lay it out."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .models import Llama


def shard(module: Llama, mesh: DeviceMesh, mode: str, loss_parallel: bool) -> None:
    """Cut the module's weights over the mesh. The stream is whole on every rank, or with mode ``sp`` cut on the sequence."""
    sequence = mode == "sp"
    stream = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if module.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    for i in module.blocks:
        plan |= {f"blocks.{i}.{name}": style for name, style in _block(stream, sequence).items()}
    if module.head is not None:
        plan["head"] = ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        )
        if sequence:
            plan["norm"] = SequenceParallel()
    parallelize_module(module, mesh, plan)


def _block(stream: Shard | Replicate, sequence: bool) -> dict[str, ParallelStyle]:
    column, row = ColwiseParallel(), RowwiseParallel(output_layouts=stream)
    plan: dict[str, ParallelStyle] = {f"attn.{name}": column for name in ("q", "k", "v")}
    plan |= {"attn.out": row, "mlp.gate": column, "mlp.up": column, "mlp.down": row}
    if sequence:
        gather = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attn": gather, "mlp": gather}
    return plan


def modules_of(module: nn.Module) -> list[nn.Module]:
    """The modules that hold parameters."""
    return [each for each in module.modules() if list(each.parameters(recurse=False))]
