"""Eight gloo processes equal one process, in five layouts of one launch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import functional_par as fp

from . import oracle
from .test_layouts import expected, model_of, transforms
from .torchrun_layouts import CASES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*launcher, "-m", "tests.torchrun_layouts", str(folder)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_equal_one_process(case, folder):
    found = [torch.load(folder / f"{case}.{rank}.pt") for rank in range(8)]
    assert all(other["seen"] == found[0]["seen"] for other in found), "metrics differ between ranks"
    reference = expected(case.model, case.pp == 8, case.tied)
    plan = fp.compose(*transforms(case))(model_of(case.model, case.pp)).plan(
        fp.Mesh(dp=case.dp, pp=case.pp, tp=case.tp)
    )
    losses, norms, tokens = zip(*found[0]["seen"], strict=True)
    weights = oracle.untie(reference.weights, plan)
    run = oracle.Run(list(losses), list(norms), list(tokens), found[0]["weights"])
    oracle.equal_runs(run, oracle.Run(reference.losses, reference.norms, reference.tokens, weights))


@pytest.mark.parametrize("case", [case for case in CASES if case.tied], ids=str)
def test_copies_of_a_tied_leaf_are_equal_bit_for_bit(case, folder):
    mesh = fp.Mesh(dp=case.dp, pp=case.pp, tp=case.tp)
    copies: dict[int, torch.Tensor] = {}
    for rank in range(8):
        own = torch.load(folder / f"{case}.{rank}.pt")["own"]
        if "embed.weight" in own:
            first = copies.setdefault(mesh.coords(rank).tp, own["embed.weight"])
            assert torch.equal(own["embed.weight"], first)
    assert len(copies) == case.tp
