"""Eight gloo processes equal one process, in five layouts of one start.

One test, since each worker of a test run that had one of several would start the eight processes anew.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

import functional_par as fp

from . import oracle
from .process_layouts import AXES, CASES, SEED, batches
from .properties.test_collectives import check_all
from .test_layouts import CLIP, model_of, transforms

ROOT = Path(__file__).parent.parent


def launch(folder):
    done = subprocess.run(
        [sys.executable, "-m", "tests.process_layouts", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def expected(case, plan):
    reference = oracle.train(plan.model, batches(), clip=CLIP)
    weights = oracle.untie(reference.weights, plan)
    return oracle.Run(reference.losses, reference.norms, reference.tokens, weights)


def check_ranks(case, found):
    """All ranks have one process's numbers, and copies of a tied leaf are equal in every bit."""
    assert all(other["seen"] == found[0]["seen"] for other in found), f"{case}: metrics differ between ranks"
    mesh = fp.Mesh(dp=case.dp, pp=case.pp, tp=case.tp)
    plan = fp.compose(*transforms(case))(model_of(case.model, case.pp)).plan(mesh)
    losses, norms, tokens = zip(*found[0]["seen"], strict=True)
    run = oracle.Run(list(losses), list(norms), list(tokens), found[0]["weights"])
    oracle.equal_runs(run, expected(case, plan))
    copies: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(8):
        for path, own in found[rank]["own"].items():
            coords = mesh.coords(rank)
            first = copies.setdefault((coords.tp, coords.dp if case.zero == 3 else 0), own)
            assert torch.equal(own, first), f"{case}: the copies of {path} differ"
    slices = case.dp if case.zero == 3 else 1
    assert len(copies) == (case.tp * slices if case.tied else 0)


def test_eight_processes_equal_one_process_tied_copies_in_every_bit_and_collectives_their_definitions(tmp_path):
    launch(tmp_path)
    for case in CASES:
        found = [torch.load(tmp_path / f"{case}.{rank}.pt") for rank in range(8)]
        check_ranks(case, found)
        if case == CASES[0]:
            mesh = fp.Mesh(dp=case.dp, pp=case.pp, tp=case.tp)
            check_all(mesh, AXES, SEED, [rank["exchanged"] for rank in found])
