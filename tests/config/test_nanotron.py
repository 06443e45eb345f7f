"""Whole nanotron files: translated, refused where the result would differ, and everything else in a note."""

from pathlib import Path

import pytest

from functional_par.config import Config, reader
from functional_par.errors import ConfigError

FIXTURES = Path(__file__).parent / "fixtures"
FILES = ["nanotron_llama.yaml", "nanotron_qwen.yaml"]


def edited(path, value, name="nanotron_llama.yaml"):
    """The fixture with one dotted key set; numbers index lists."""
    data = reader.read(FIXTURES / name)
    node, *parents = data, *path.split(".")[:-1]
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
    node[path.split(".")[-1]] = value
    return data


def load(path, value):
    return Config.from_dict(edited(path, value), "x.yaml")


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_translates(name):
    config = Config.load(FIXTURES / name)
    model = config.sections.model
    assert (model.name, model.vocab, model.d_model, model.n_layers, model.d_ff) == ("llama", 256, 32, 2, 48)
    assert (model.n_heads, model.n_kv_heads, model.tie, model.init_std) == (4, 2, True, 0.03)
    assert (config.mesh().sizes, config.seed, config.data_seed) == ({"ep": 1, "pp": 1, "dp": 2, "cp": 1, "tp": 2}, 3, 7)
    assert (config.global_batch_size, config.microbatches, config.seq_len, config.steps) == (12, 2, 16, 10)
    assert config.sections.parallelism.tp_mode == "REDUCE_SCATTER"
    assert (config.clip, config.sections.optimizer.weight_decay) == (1.0, 0.01)
    rate = config.optimizer().lr
    assert [rate(0), rate(2), rate(10)] == pytest.approx([0.0, 3e-4, 1e-5])


def test_notes_say_what_was_left_aside_and_why():
    notes = Config.load(FIXTURES / "nanotron_qwen.yaml").notes
    assert "general.project, general.run: left aside, names and counters of nanotron's own runs" in notes
    assert any(note.startswith("checkpoints.") and "not written yet" in note for note in notes)
    assert any("_use_doc_masking" in note for note in notes)
    assert any("data_stages.0.data.dataset" in note and "--tokens" in note for note in notes)
    assert not any("rope_theta" in note or "lighteval" in note for note in notes)


def test_our_own_files_have_no_notes():
    tokens = {"sequence_length": 4, "train_steps": 2, "global_batch_size": 2}
    assert Config.from_dict({"model": {"d_model": 8, "n_layers": 1, "n_heads": 2}, "tokens": tokens}).notes == ()


def test_what_is_left_out_is_what_nanotron_takes():
    data = edited("general", {"project": "debug"})
    del data["model"]["dtype"], data["model"]["model_config"]["num_key_value_heads"]
    for name in ("rms_norm_eps", "tie_word_embeddings"):
        del data["model"]["model_config"][name]
    data["data_stages"][0]["data"]["seed"] = None
    config = Config.from_dict(data)
    model = config.sections.model
    assert (config.seed, config.data_seed, model.dtype) == (42, 42, "bfloat16")
    assert (model.n_kv_heads, model.norm_eps, model.tie, model.rope_theta) == (None, 1e-6, False, 10000.0)


def test_a_stage_may_give_the_sequence_length():
    data = edited("data_stages.0.sequence_length", 8)
    del data["tokens"]["sequence_length"]
    assert Config.from_dict(data).seq_len == 8
    with pytest.raises(ConfigError, match=r"data_stages\.0\.sequence_length: got 8, but tokens\.sequence_length is 16"):
        load("data_stages.0.sequence_length", 8)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("gneral", "general"),
        ("general.sed", "seed"),
        ("checkpoints.checkpoint_intervall", "checkpoint_interval"),
        ("model.dtyp", "dtype"),
        ("model.init_method.stdd", "std"),
        ("model.model_config.hiden_size", "hidden_size"),
        ("parallelism.tp_mod", "tp_mode"),
        ("tokens.micro_batchsize", "micro_batch_size"),
        ("optimizer.clip_gradient", "clip_grad"),
        ("optimizer.learning_rate_scheduler.lr_warmup", "lr_warmup_style"),
        ("data_stages.0.nam", "name"),
        ("data_stages.0.data.sed", "seed"),
        ("profiler.waitt", "wait"),
        ("tokenizer.tokenizer_name", "tokenizer_name_or_path"),
        ("logging.log_levl", "log_level"),
    ],
)
def test_a_key_that_neither_knows_is_an_error(path, nearest):
    with pytest.raises(ConfigError, match=rf"^x\.yaml: {path} is unknown: did you mean '{nearest}"):
        load(path, 1)


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("hidden_act", "gelu", "SwiGLU"),
        ("attention_bias", True, "no biases"),
        ("rope_scaling", {"factor": 8.0}, "not scaled"),
        ("rope_interleaved", True, "halves of a head"),
        ("rope_seq_len_interpolation_factor", 2.0, "not interpolated"),
        ("sliding_window_size", 20, "whole sequence"),
        ("flex_attention_mask", "document", "no other mask"),
        ("ring_attn_heads_k_stride", 1, "ring attention"),
        ("no_rope_layer", 2, "every layer has rotary"),
        ("moe_config", {"num_experts": 4}, "mixture-of-experts"),
        ("z_loss_enabled", True, "z-loss"),
        ("is_starcoder2_config", True, "starcoder2"),
    ],
)
def test_a_model_option_that_would_change_the_result_is_refused(name, value, why):
    with pytest.raises(ConfigError, match=rf"^x\.yaml: model\.model_config\.{name}: .*{why}.*\. Set it to "):
        load(f"model.model_config.{name}", value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.init_method.use_mup", True, "spectral mup is not available"),
        ("model.init_method.path", "ckpt", "starting from a checkpoint is not available yet"),
        ("model.init_method.scaling_method", "NONE", "sqrt"),
        ("checkpoints.resume_checkpoint_path", "ckpt", "cannot be resumed yet"),
        ("model.model_config.hidden_size", "big", r"model\.model_config\.hidden_size: got 'big'"),
        ("model.model_config.num_attention_heads", 0, "num_attention_heads: got 0; expected an integer of at least 1"),
        ("model.dtype", "float16", "expected one of float32, float64, bfloat16"),
        ("model.model_config.max_position_embeddings", 8, r"sequence_length=16 is beyond .*max_position_embeddings=8"),
        ("model.model_config", None, "model.model_config: got null; expected a llama or qwen2 section"),
        ("model.init_method", 3, "model.init_method: got 3; expected a section"),
        ("data_stages", [], "expected a list of sections"),
        ("data_stages", [1], r"data_stages\.0: got 1; expected a section"),
        ("data_stages.0.data", 4, r"data_stages\.0\.data: got 4; expected a section"),
    ],
)
def test_what_is_wrong_is_told_in_nanotrons_words(path, value, message):
    with pytest.raises(ConfigError, match=message):
        load(path, value)


def test_only_one_data_stage_is_available():
    stages = reader.read(FIXTURES / FILES[0])["data_stages"] * 2
    with pytest.raises(ConfigError, match="data_stages has 2 stages; only one is available yet"):
        load("data_stages", stages)
