"""Stages and schedules of torch.distributed.pipelining for the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from .models import Llama, mean_loss
from .setting import Job

SCHEDULES: Mapping[str, Any] = MappingProxyType(
    {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "looped-bfs": schedules.ScheduleLoopedBFS,
        "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
)
V_SHAPED = ("zbv", "dualpipev")
"""Their last stage is on the first rank."""


def pipeline(job: Job, mesh: DeviceMesh, parallel: Callable[[Llama], nn.Module]) -> tuple[Any, list[PipelineStage]]:
    """The schedule and this rank's stages, whose modules went through ``parallel``."""
    name, split = job.options["pp"], job.options["split"]
    count, ranks, rank = len(split), job.axis("pp"), mesh.get_local_rank("pp")
    cuts = list(pairwise((0, *accumulate(split))))
    stages = []
    for index in _indices(name, count, ranks, rank):
        first, last = index == 0, index == count - 1
        module = parallel(Llama(job.sizes, range(*cuts[index]), first, last))
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), group=mesh.get_group("pp")))
    given = stages[0] if count == ranks else stages
    return SCHEDULES[name](given, job.microbatches, loss_fn=mean_loss), stages


def _indices(name: str, count: int, ranks: int, rank: int) -> list[int]:
    """Stages of a rank."""
    if name in V_SHAPED:
        return [rank, count - 1 - rank]
    return list(range(rank, count, ranks))
