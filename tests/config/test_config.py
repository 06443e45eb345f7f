"""Config: what a file builds, overrides, and checks across keys."""

import pytest
import torch

from functional_par.config import Config
from functional_par.errors import ConfigError

TEXT = """
parallelism: {dp: 2, tp: 2, pp: 2}
tokens: {sequence_length: 8, train_steps: 20, global_batch_size: 8, microbatches: 2}
model: {d_model: 16, n_layers: 2, n_heads: 4, tie: true, dtype: float64}
optimizer:
  clip_grad: 1
  weight_decay: 0.1
  weight_decay_exclude_named_params: ['.*norm', '.*bias']
  learning_rate_scheduler: {learning_rate: 1e-2, lr_warmup_steps: 10, lr_decay_style: cosine, min_decay_lr: 0}
general: {seed: 5}
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x.yaml").write_text(TEXT)
    return tmp_path / "x.yaml"


def test_a_file_says_what_runs(path):
    config = Config.load(path)
    assert config.mesh().size == 8
    assert (config.global_batch_size, config.microbatches, config.batch.micro_size) == (8, 2, 2)
    assert (config.seq_len, config.steps, config.seed, config.data_seed) == (8, 20, 5, 5)
    assert (config.clip, config.dtype, config.engine) == (1.0, torch.float64, "func")
    assert config.source == str(path)


def test_the_learning_rate_is_a_function_of_the_step(path):
    rate = Config.load(path).optimizer().lr
    assert [rate(0), rate(5), rate(10), rate(15), rate(20)] == pytest.approx([0, 5e-3, 1e-2, 5e-3, 0], abs=1e-12)


def test_a_run_may_end_before_its_warm_up_does(path):
    assert Config.load(path, {"tokens.train_steps": 3}).optimizer().lr(2) == pytest.approx(2e-3)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_sgd_takes_its_momentum(path, momentum):
    config = Config.load(
        path,
        {
            "optimizer.optimizer_factory": {"name": "SGD", "momentum": momentum},
            "optimizer.weight_decay_exclude_named_params": None,
        },
    )
    assert config.optimizer().slots == (("momentum",) if momentum else ())


def test_excluded_leaves_do_not_decay(path):
    optimizer = Config.load(path).optimizer()
    params = {"a.weight": torch.ones(2), "b.norm.weight": torch.ones(2)}
    zeros = {name: torch.zeros(2) for name in params}
    new, _ = optimizer.update(zeros, optimizer.init(params), params, step=10, inplace=False)
    torch.testing.assert_close(new["a.weight"], torch.full((2,), 1 - 0.01 * 0.1))
    assert torch.equal(new["b.norm.weight"], params["b.norm.weight"])


def test_overrides_take_the_place_of_the_files_values(path):
    config = Config.load(path, {"parallelism.tp": 1, "tokens.train_steps": 3, "data.seed": 9})
    assert (config.mesh().size, config.steps, config.data_seed, config.seed) == (4, 3, 9, 5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data.text": "a", "data.tokens": "b"}, "data.text and data.tokens are both given"),
        ({"parallelism.stage_layers": [1, 2, 3]}, "stage_layers has 3 stages, but 1f1b on pp=2 ranks has 2"),
        ({"model.n_heads": 3}, "d_model=16 does not divide into model.n_heads=3 heads. Take a multiple of 3"),
        ({"model.n_kv_heads": 2}, "model.n_kv_heads has no meaning for a gpt"),
        ({"model.rope_theta": 1.0}, "model.rope_theta has no meaning for a gpt"),
        ({"model.name": "llama", "model.bias": True}, "model.bias has no meaning for a llama"),
        (
            {"model.name": "llama", "model.n_kv_heads": 3},
            "n_heads=4 does not divide into groups for model.n_kv_heads=3",
        ),
        ({"optimizer.optimizer_factory.momentum": 0.9}, "momentum has no meaning for adamW"),
        ({"optimizer.optimizer_factory": {"name": "sgd", "adam_eps": 1e-8}}, "adam_eps has no meaning for sgd"),
        ({"optimizer.optimizer_factory": {"name": "sgd"}}, "exclude_named_params is available for adamW only"),
        ({"optimizer.weight_decay_exclude_named_params": ["("]}, r"'\(' is no regular expression"),
        ({"optimizer.learning_rate_scheduler.lr_decay_starting_step": 3}, "learning_rate_scheduler: .*decay_start = 3"),
        ({"optimizer.learning_rate_scheduler.min_decay_lr": 1}, "learning_rate_scheduler: .*above the peak"),
        ({"tokens.microbatches": 3}, "does not divide into 2 data-parallel replicas"),
    ],
)
def test_keys_that_do_not_go_together_are_refused_at_once(path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        Config.load(path, overrides)


def test_context_parallelism_is_refused_when_a_program_is_made(path):
    config = Config.load(path, {"parallelism.cp": 2})
    assert config.mesh().cp == 2
    with pytest.raises(ConfigError, match=r"parallelism\.cp=2: context parallelism is not available yet"):
        config.program()


def test_the_batch_is_split_over_ep_as_over_dp(path):
    assert Config.load(path, {"parallelism.ep": 2}).batch.replicas == 4


def test_replacing_a_section_checks_again(path):
    config = Config.load(path)
    with pytest.raises(ConfigError, match="does not divide"):
        config.replace(
            tokens=Config.load(path, {"tokens.global_batch_size": 4, "parallelism.dp": 1}).sections.tokens,
            parallelism=Config.load(path, {"parallelism.dp": 4}).sections.parallelism,
        )
