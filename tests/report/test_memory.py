"""A model that no memory holds is refused before it is made, and never one that fits."""

import functools
from dataclasses import replace

import pytest
import torch

from functional_par.config import Config
from functional_par.errors import ConfigError
from functional_par.report import memory
from functional_par.report.memory import check_memory

DATA = {
    "tokens": {"sequence_length": 8, "train_steps": 2, "global_batch_size": 8},
    "model": {"d_model": 16, "n_layers": 2, "n_heads": 4},
}


@functools.cache
def plan(**parallelism):
    config = Config.from_dict({**DATA, "parallelism": parallelism})
    return config.program().plan(config.mesh())


def elements(plan):
    return sum(torch.Size(spec.shape).numel() for spec in plan.specs.values())


@pytest.mark.parametrize(("dtype", "each"), [(torch.float32, 8), (torch.float64, 16), (torch.bfloat16, 10)])
@pytest.mark.parametrize(("layout", "copies"), [({}, 1), ({"dp": 2}, 2), ({"pp": 2}, 1), ({"dp": 2, "pp": 2}, 2)])
def test_threads_hold_parameters_and_gradients_of_every_rank(dtype, each, layout, copies):
    found = replace(plan(**layout), precision=None)
    needed = elements(found) * copies * each
    check_memory(found, dtype, "threads", needed)
    with pytest.raises(
        ConfigError, match=rf"of {found.mesh.size} ranks take 0 GB, but this machine has 0 GB\. Make model"
    ):
        check_memory(found, dtype, "threads", needed - 1)


def test_processes_count_those_of_this_machine(monkeypatch):
    found = plan(dp=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_memory(found, torch.float32, "gloo", elements(found) * 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="of 2 ranks"):
        check_memory(found, torch.float32, "gloo", elements(found) * 8)


def test_gpus_and_machines_that_do_not_say_are_not_judged(monkeypatch):
    check_memory(plan(), torch.float32, "nccl", 1)
    monkeypatch.setattr(memory.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert memory.physical_memory() is None
    check_memory(plan(), torch.float32, "threads")


def test_this_machine_says():
    assert memory.physical_memory() > 1 << 20
