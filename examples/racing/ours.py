"""Our own step, on processes over gloo or on threads of one process, in one of the variants."""

from __future__ import annotations

import functional_par as fp

from .models import batch_of
from .setting import BETAS, CLIP, EPS, LAYOUTS, LR, WEIGHT_DECAY, Job
from .variants import variant
from .worker import Serve


def main(job: Job, serve: Serve) -> None:
    """Options: ``variant``."""
    chosen = variant(job.options["variant"])
    program = fp.compose(
        fp.shard_tp(**chosen.tp),
        fp.stage_pp(**{"microbatches": job.microbatches, **chosen.pp}),
        fp.dp_reduce(**chosen.dp),
        *chosen.more(),
    )(fp.models.llama(**job.sizes))
    mesh, batch = fp.Mesh(**LAYOUTS[job.contender.layout]), batch_of(job.sizes)

    def on_rank(world: fp.World) -> None:
        optimizer = fp.optim.adamw(LR, BETAS, EPS, WEIGHT_DECAY)
        step = program.step(world, optimizer, **{"clip": CLIP, "donate": True, **chosen.step})
        state = step.init(0)

        def once() -> float:
            nonlocal state
            state, metrics = step(state, batch)
            return metrics["loss"]

        def sent() -> int:
            world.record.clear()
            once()
            return sum(world.record.sent.values())

        serve(once, sent)

    fp.run(on_rank, mesh, keep_memory=True)
