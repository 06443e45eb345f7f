"""Every key of a nanotron configuration outside the shared sections, and its rule: moved, refused, or left aside.

Key names and defaults are those of nanotron's ``config`` package (Apache-2.0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Move:
    """The value goes to another key; ``default`` is what nanotron takes when it is left out."""

    to: str
    default: Any = None


@dataclass(frozen=True)
class Only:
    """Some values change nothing here; any other would change the result, so it is refused."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Aside:
    """Has no meaning here, or none yet: a note says so, unless the value is one of ``quiet``."""

    why: str
    quiet: tuple[Any, ...] = (None,)


Rule = Move | Only | Aside

_NAMES = Aside("names and counters of nanotron's own runs")
_NO_CHECKPOINTS = Aside("checkpoints are not written yet")
_TOKENIZER = Aside("text is read as bytes, or as ids that are tokens already", quiet=(None,))
_KERNEL = Aside("the library chooses its own kernels")
_PROFILER = Aside("there is no profiler section")
_SPECIAL_IDS = Aside("no token is special in training")
_VALIDATION = Aside("there is no evaluation")

GENERAL: dict[str, Rule] = {
    "seed": Move("general.seed", 42),
    "ignore_sanity_checks": Aside("checks always run", quiet=(None, True, False)),
    **dict.fromkeys(("project", "run", "step", "consumed_train_samples", "benchmark_csv_path"), _NAMES),
}

CHECKPOINTS: dict[str, Rule] = {
    "resume_checkpoint_path": Only((None,), "a run cannot be resumed yet"),
    **dict.fromkeys(
        (
            "checkpoints_path",
            "checkpoint_interval",
            "save_initial_state",
            "save_final_state",
            "load_lr_scheduler",
            "load_optimizer",
            "checkpoints_path_is_shared_file_system",
        ),
        _NO_CHECKPOINTS,
    ),
}

TOKENIZER: dict[str, Rule] = dict.fromkeys(
    ("tokenizer_name_or_path", "tokenizer_revision", "tokenizer_max_length"), _TOKENIZER
)

PROFILER: dict[str, Rule] = dict.fromkeys(
    (
        "profiler_export_path",
        "wait",
        "warmup",
        "active",
        "repeat",
        "skip_first",
        "record_shapes",
        "profile_memory",
        "with_stack",
        "export_chrome_trace",
    ),
    _PROFILER,
)

MODEL: dict[str, Rule] = {
    "dtype": Move("model.dtype", "bfloat16"),
    "ddp_bucket_cap_mb": Aside("gradients are bucketed by who owes them"),
    "make_vocab_size_divisible_by": Aside("the vocabulary is padded to what tp needs, and masked", quiet=(None, 1)),
}

INIT_METHOD: dict[str, Rule] = {
    "std": Move("model.init_std", 0.025),
    "scaling_method": Only((None, "NUM_LAYERS"), "projections into the stream start with std / sqrt(2 layers)"),
    "use_mup": Only((None,), "spectral mup is not available"),
    "path": Only((None,), "starting from a checkpoint is not available yet"),
}

MODEL_CONFIG: dict[str, Rule] = {
    "vocab_size": Move("model.vocab", 32000),
    "hidden_size": Move("model.d_model", 4096),
    "num_hidden_layers": Move("model.n_layers", 32),
    "num_attention_heads": Move("model.n_heads", 32),
    "num_key_value_heads": Move("model.n_kv_heads"),
    "intermediate_size": Move("model.d_ff", 11008),
    "rms_norm_eps": Move("model.norm_eps", 1e-6),
    "rope_theta": Move("model.rope_theta", 10000.0),
    "tie_word_embeddings": Move("model.tie", False),
    "is_llama_config": Only((None, True), "the model is a llama or a qwen2"),
    "is_qwen2_config": Only((None, True), "the model is a llama or a qwen2"),
    "is_starcoder2_config": Only((None, False), "starcoder2 is not available"),
    "hidden_act": Only(("silu",), "the MLP is a SwiGLU"),
    "attention_bias": Only((None, False), "attention has no biases in the llama model"),
    "rope_scaling": Only((None,), "rotary angles are not scaled"),
    "rope_interleaved": Only((None, False), "rotary pairs are halves of a head, not neighbours"),
    "rope_seq_len_interpolation_factor": Only((None,), "positions are not interpolated"),
    "sliding_window_size": Only((None,), "attention sees the whole sequence before a token"),
    "flex_attention_mask": Only((None, "None"), "attention is causal, with no other mask"),
    "ring_attn_heads_k_stride": Only((None,), "ring attention is not available yet"),
    "no_rope_layer": Only((None,), "every layer has rotary positions"),
    "moe_config": Only((None,), "mixture-of-experts layers are not available yet"),
    "z_loss_enabled": Only((None, False), "the z-loss is not available"),
    "z_loss_coefficient": Aside("the z-loss is off", quiet=(None, 1e-4)),
    "max_position_embeddings": Aside("rotary positions need no table"),
    "initializer_range": Aside("nanotron starts from init_method.std"),
    "pretraining_tp": Aside("the layout is in parallelism", quiet=(None, 1)),
    "use_cache": Aside("training keeps no cache", quiet=(None, True, False)),
    "_use_doc_masking": Aside("documents are not masked from each other", quiet=(None, False)),
    "_attn_implementation": _KERNEL,
    "log_attn_probs": Aside("attention is not logged", quiet=(None, True, False)),
    **dict.fromkeys(("_fused_rms_norm", "_fused_rotary_emb", "_use_qkv_packed"), _KERNEL),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _SPECIAL_IDS),
}

METRICS_LOGGING: dict[str, Rule] = dict.fromkeys(("log_level", "log_detail_interval"), Aside("see logging"))

SECTIONS_ASIDE = {"lighteval": _VALIDATION, "s3_upload": Aside("nothing is uploaded")}
SECTIONS_SHARED = ("parallelism", "tokens", "optimizer", "logging", "data")
SECTIONS = {
    "general": GENERAL,
    "checkpoints": CHECKPOINTS,
    "tokenizer": TOKENIZER,
    "profiler": PROFILER,
    "metrics_logging": METRICS_LOGGING,
}
STAGE_KEYS = ("name", "start_training_step", "data", "sequence_length")
DATA_KEYS = ("dataset", "seed", "num_loading_workers")

DATASET = Aside("the corpus is data.text or data.tokens (--text, --tokens)")
