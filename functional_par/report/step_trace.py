"""The trace file of a training run: the timeline of one of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from functional_par.mesh import AXES, Mesh
from functional_par.pipeline.recording import Recording
from functional_par.report.chrome_trace import write_trace

if TYPE_CHECKING:
    from functional_par.comm.base import World
    from functional_par.config import Config

KEY = "logging.trace_file (--trace-file)"


@contextmanager
def traced(world: World, config: Config, step: int) -> Iterator[Recording | None]:
    """What to give to ``step(state, batch, recording)``: a recording in the step that is traced, None in all others.

    Collective in the step that is traced: the ranks compare their clocks, and rank 0 writes the file.

    Args:
        world: all ranks.
        config: ``logging.trace_file`` and ``logging.trace_step``.
        step: number of the step, from 1.
    """
    logging = config.sections.logging
    if logging.trace_file is None or step != logging.trace_step:
        yield None
        return
    recording = Recording(times=True)
    yield recording
    timeline = recording.timeline(world)
    if world.rank == 0:
        engine = config.sections.parallelism.pp_engine or "1f1b"
        write_trace(
            logging.trace_file,
            timeline,
            schedule=Path(engine).name,
            pp=world.mesh.pp,
            microbatches=config.microbatches,
            labels=row_labels(world.mesh),
            what=KEY,
        )


def row_labels(mesh: Mesh) -> tuple[str, ...]:
    """A name of each rank with its place on the axes that have more than one.

    >>> row_labels(Mesh(dp=2, pp=2))[1]
    'rank 1: pp 0, dp 1'
    """
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1]
    places = (", ".join(f"{axis} {getattr(mesh.coords(rank), axis)}" for axis in axes) for rank in range(mesh.size))
    return tuple(f"rank {rank}: {place}" if place else f"rank {rank}" for rank, place in enumerate(places))
