"""What happens before any rank exists: check everything that can be known without running, then show the header."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from functional_par.config.flags import Options
from functional_par.errors import MeshError
from functional_par.launch import launched
from functional_par.mesh import Mesh
from functional_par.report.header import explained, header
from functional_par.report.memory import check_memory
from functional_par.report.metrics_file import check_writable
from functional_par.report.step_trace import KEY as TRACE_KEY
from functional_par.run import MOST_THREADS

if TYPE_CHECKING:
    from functional_par.data import Corpus
    from functional_par.program import Program


def prepare(options: Options, mesh: Mesh, program: Program, corpus: Corpus) -> None:
    """Check mesh, plan, corpus and files together; then the first process prints the header.

    Raises:
        ParallelError: whatever the user can mend; nothing has been printed, written or started.
    """
    from functional_par import data

    config = options.config
    check_world(mesh)
    backend = options.backend or default_backend()
    check_threads(mesh, backend)
    plan = program.plan(mesh)
    check_memory(plan, config.dtype, backend)
    data.batches(corpus, batch_size=config.global_batch_size, seq_len=config.seq_len, steps=config.steps)
    check_writable(config.sections.logging.metrics_file)
    check_writable(config.sections.logging.trace_file, TRACE_KEY)
    say(header(config, plan, corpus, backend))
    if options.explain:
        say(str(explained(config, plan)))


def check_world(mesh: Mesh) -> None:
    """Raise MeshError unless torchrun, if it is there, started as many processes as the mesh has ranks."""
    if not launched():
        return
    ranks = os.environ["WORLD_SIZE"]
    if not ranks.isdigit():
        raise MeshError(f"WORLD_SIZE={ranks!r} in the environment: the number of processes is needed.")
    mesh.check_world(int(ranks))


def check_threads(mesh: Mesh, backend: str) -> None:
    """Raise MeshError for more ranks than one process can run as threads in any useful time."""
    if backend == "threads" and mesh.size > MOST_THREADS:
        raise MeshError(
            f"{mesh} has {mesh.size} ranks, and without torchrun each is a thread of this process; at most {MOST_THREADS} "
            f"are started. Start {mesh.size} processes (torchrun --nproc-per-node N), or make the mesh smaller. "
            "To look at a layout without running it: python -m functional_par plan."
        )


def default_backend() -> str:
    """Where ``fp.run`` puts ranks when it is not told."""
    if not launched():
        return "threads"
    return "nccl" if torch.cuda.is_available() else "gloo"


def say(text: str) -> None:
    """Print once, not once a process."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
