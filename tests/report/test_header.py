"""The header and what is checked before it."""

import numpy as np
import pytest
import torch

import functional_par as fp
from functional_par.config.flags import Options
from functional_par.pipeline.memory import stage_memory
from functional_par.report import explained, header
from functional_par.report.prepare import default_backend, prepare
from functional_par.report.stages import activations, held_by_state, share
from functional_par.report.text import size


def config(**changes):
    data = {
        "parallelism": {"dp": 2, "pp": 2, "tp": 2, "tp_mode": "REDUCE_SCATTER", "tp_linear_async_communication": True},
        "tokens": {"sequence_length": 8, "train_steps": 5, "global_batch_size": 8, "microbatches": 2},
        "model": {"d_model": 16, "n_layers": 2, "n_heads": 4, "tie": True},
        "optimizer": {"clip_grad": 1.0, "learning_rate_scheduler": {"lr_warmup_steps": 2, "min_decay_lr": 0.0}},
        **changes,
    }
    return fp.Config.from_dict(data)


@pytest.fixture
def corpus():
    return fp.data.Corpus(np.arange(256, dtype=np.uint8), vocab=256, name="every byte")


def test_the_header_says_what_runs_where(corpus):
    given = config()
    text = header(given, given.program().plan(given.mesh()), corpus, "threads")
    assert "Mesh(pp=2, dp=2, tp=2) = 8, threads" in text
    assert "REDUCE_SCATTER, async" in text
    assert "tied: head.weight = embed.weight" in text
    plan = given.program().plan(given.mesh())
    batch = dict.fromkeys(("tokens", "labels"), ((2, 8), torch.int64))
    for stage, memory in enumerate(stage_memory(plan, batch, optimizer=given.optimizer())):
        state, kept = memory.parameters + memory.gradients + memory.state, f"{memory.live} * {size(memory.saved)}"
        work = f"{100 * share(plan, stage):.0f}% of the work, {size(state)} of state + {kept} of activations a rank"
        assert work in next(line for line in text.split("\n") if line.startswith(f"stage {stage} "))
    assert "8 sequences of 8 = 64 tokens a step (2 replicas * 2 microbatches * 2), 5 steps" in text
    assert "every byte: 256 tokens, unigram entropy 5.545 nats" in text
    assert "adamW, learning rate 0.0003, 2 steps of warm-up, linear to 0, clip 1.0, seed 0" in text


def test_the_header_counts_a_tied_leaf_once():
    given = config()
    model = given.model()
    total = sum(np.prod(leaf.shape) for path, leaf in model.leaves.items() if path != "head.weight")
    assert f"gpt, {total:,} parameters" in header(given, given.program().plan(given.mesh()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_explained_has_the_memory_of_the_header(dtype):
    model = {"d_model": 16, "n_layers": 2, "n_heads": 4, "dtype": dtype}
    optimizer = {
        "optimizer_factory": {"name": "sgd", "momentum": 0.9},
        "learning_rate_scheduler": {"learning_rate": 0.1},
    }
    given = config(model=model, optimizer=optimizer)
    plan = given.program().plan(given.mesh())
    text, shown = header(given, plan), str(explained(given, plan))
    assert "of one with tokens 2 8, labels 2 8; fast kernels keep less." in shown
    assert "and 1 moment of an optimizer" in shown
    batch = dict.fromkeys(("tokens", "labels"), ((2, 8), torch.int64))
    for memory in stage_memory(plan, batch, given.dtype, given.optimizer()):
        state, kept = size(held_by_state(memory)), activations(memory)
        assert f"{state} of state + {kept} of activations" in text
        assert f" {state} {kept} " in " ".join(shown.split())


def introduce(given, corpus, **options):
    prepare(Options(given, **options), given.mesh(), given.program(), corpus)


def test_a_good_run_is_introduced_once(corpus, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    introduce(config(), corpus)
    assert capsys.readouterr().out.startswith("model      gpt")


def test_other_processes_say_nothing(corpus, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    introduce(config(), corpus)
    assert capsys.readouterr().out == ""


def test_a_wrong_number_of_processes_is_told_with_every_factor(corpus, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(fp.MeshError, match=r"ep=1 \* pp=2 \* dp=2 \* cp=1 \* tp=2 = 8 ranks, but 4 are running"):
        introduce(config(), corpus)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(fp.MeshError, match="WORLD_SIZE='many'"):
        introduce(config(), corpus)
    assert capsys.readouterr().out == ""


def test_a_text_that_is_too_short_is_told_before_anything_is_printed(capsys):
    with pytest.raises(fp.DataError, match="too few for seq_len = 8"):
        introduce(config(), fp.data.Corpus(np.zeros(8, dtype=np.uint8), vocab=256, name="short"))
    assert capsys.readouterr().out == ""


def test_the_backend_is_the_one_that_run_takes(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert default_backend() == "threads"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_backend() == "gloo"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_backend() == "nccl"
