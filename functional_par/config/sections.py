"""The sections of a configuration as frozen dataclasses: every key, its default, its range, and what it does here.

``parallelism``, ``tokens`` and ``optimizer`` use nanotron's names, so that those sections of its files load unchanged.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

from functional_par.config.rule import key
from functional_par.pipeline.products import POLICIES
from functional_par.pipeline.schedules import canonical, schedule_names

LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "passive")
DTYPES = ("float32", "float64", "bfloat16")
LARGEST_SEED = 2**63 - 1
LARGEST_SIZE = 2**31 - 1
"""Of a dimension, and of a count that no loop runs over before the first step. Below what int64 can index."""
MOST_RANKS, MOST_LAYERS, MOST_MICROBATCHES = 100_000, 2048, 16_384
"""What a plan can hold: each of these is planned one by one."""


def _ranks(**rule: Any) -> Any:
    return key(1, low=1, high=MOST_RANKS, **rule)


def _layers(default: Any = MISSING) -> Any:
    return key(default, low=1, high=MOST_LAYERS)


def _size(default: Any = MISSING, low: int = 1) -> Any:
    return key(default, low=low, high=LARGEST_SIZE)


@dataclass(frozen=True, kw_only=True)
class General:
    """Attributes:
    seed: initial values (and the order of the data, unless ``data.seed`` is given) are functions of it.
    keep_memory: processes keep the CPU memory that tensors free for the next ones, which is faster; it goes back to the system
        when they end.
    engine: how layers are differentiated: ``func`` by torch.func.vjp; ``tape`` by torch.autograd.grad, the same bits, a little
        faster where layers are small; ``compile`` by torch.compile, which takes minutes at the first step.
    """

    seed: int = key(0, low=0, high=LARGEST_SEED)
    keep_memory: bool = key(True)
    engine: str = key("func", choices=("func", "tape", "compile"))


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How ranks are laid out.

    Attributes:
        dp, pp, tp, cp, ep: sizes of the mesh axes. The batch is split over ep as over dp.
        pp_engine: the pipeline schedule, by any of its names (``Interleaved1F1B`` is ``interleaved``), or a CSV file of actions
            as torch's pipelining reads them. The path of a file that does not start with ``/`` is relative to the current
            directory, as ``data.text`` is. Engines differ in memory and time, never in results. torchtitan's
            ``pipeline_parallel_schedule`` is the same key.
        pp_chunks: stages on each rank, for engines that have several; null is the engine's own number.
        tp_mode: how activations lie between tensor-parallel layers.
        tp_linear_async_communication: overlap tensor-parallel communication with computation.
        tp_recompute_allgather: accepted; the gathered input of a layer is never stored here, as with ``true``.
        recompute_layer: as ``remat: full``.
        remat: what is kept of each block for its backward: ``none`` keeps all, ``full`` its input, from which it runs again,
            ``selective`` its input and its matrix products. Gradients have the same bits. null is ``none``.
        remat_layers: the layers that this is about, by names or with wildcards, such as ``["block0-3", "head"]``; null is all
            blocks.
        stage_layers: layers of each stage, in order, embedding and head included: how many, or their names, such as
            ``["embed block0-1", "block2 head"]``; null cuts by cost. Used when pp > 1.
        stage_memory_gb: gigabytes that a rank has for its stages: parameters, gradients, optimizer state, activations. Layers
            are cut so that they fit, or there is an error. Used when pp > 1.
        gradient_bucket_mb: most MiB of float32 gradients that are summed in one collective, which starts while earlier layers
            are in their backward; null is 48. Not used with ``optimizer.zero_stage`` 2 and 3, which sum layer by layer.
    """

    dp: int = _ranks()
    pp: int = _ranks(aliases=("pipeline_parallel_degree",))
    tp: int = _ranks()
    cp: int = _ranks(aliases=("context_parallel_size",))
    ep: int = _ranks(aliases=("expert_parallel_size",))
    pp_engine: str | None = key(
        "1f1b",
        choices=schedule_names(),
        canonical=canonical,
        files=".csv",
        aliases=("pipeline_parallel_schedule", "pipeline_parallel_schedule_csv"),
    )
    pp_chunks: int | None = _layers(None)
    tp_mode: str | None = key("ALL_REDUCE", choices=("ALL_REDUCE", "REDUCE_SCATTER"))
    tp_linear_async_communication: bool | None = key(False)
    tp_recompute_allgather: bool = key(True)
    recompute_layer: bool = key(False)
    remat: str | None = key(None, choices=POLICIES)
    remat_layers: tuple[str, ...] | None = key(None)
    stage_layers: tuple[int | str, ...] | None = _layers(None)
    stage_memory_gb: float | None = key(None, above=0)
    gradient_bucket_mb: float | None = key(None, above=0)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """How much is read a step. See ``config.batch`` for the sizes that may be left out.

    Attributes:
        sequence_length: tokens a sequence.
        train_steps: optimizer steps.
        micro_batch_size: sequences a microbatch, on each data-parallel replica.
        batch_accumulation_per_replica: microbatches a step, on each replica.
        global_batch_size: sequences a step over all replicas, whatever the layout.
        microbatches: the same quantity as batch_accumulation_per_replica.
        val_check_interval: steps between validations; -1 is never.
        limit_val_batches, limit_test_batches: accepted; without validation they limit nothing.
    """

    sequence_length: int = _size()
    train_steps: int = _size()
    micro_batch_size: int | None = _size(None)
    batch_accumulation_per_replica: int | None = key(None, low=1, high=MOST_MICROBATCHES)
    global_batch_size: int | None = _size(None)
    microbatches: int | None = key(None, low=1, high=MOST_MICROBATCHES)
    val_check_interval: int | None = key(-1, available=(-1,), why="there is no validation loop")
    limit_val_batches: int | None = _size(0, low=0)
    limit_test_batches: int | None = _size(0, low=0)


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of the step: warm-up, constant, decay, constant.

    Attributes:
        learning_rate: the peak.
        lr_warmup_steps, lr_warmup_style: steps of warm-up from zero; ``constant`` starts at the peak.
        lr_decay_starting_step: first step of the decay; null is the end of the warm-up.
        lr_decay_steps: steps of decay; null is all that remain.
        lr_decay_style: shape of the decay; null is linear.
        min_decay_lr: where the decay ends; null is the peak, that is no decay.
    """

    learning_rate: float = key(3e-4, above=0)
    lr_warmup_steps: int = _size(0, low=0)
    lr_warmup_style: str | None = key("linear", choices=("linear", "constant"))
    lr_decay_style: str | None = key("linear", choices=("linear", "cosine", "1-sqrt"))
    lr_decay_steps: int | None = _size(None, low=0)
    lr_decay_starting_step: int | None = _size(None, low=0)
    min_decay_lr: float | None = key(None, low=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerFactory:
    """Attributes:
    name: ``adamW`` (decoupled weight decay) or ``sgd``.
    adam_beta1, adam_beta2, adam_eps: for adamW; null is 0.9, 0.95 and 1e-8.
    torch_adam_is_fused: accepted; results do not depend on it.
    momentum: for sgd; null is 0.
    """

    name: str = key("adamW", choices=("adamW", "sgd"))
    adam_beta1: float | None = key(None, low=0, below=1)
    adam_beta2: float | None = key(None, low=0, below=1)
    adam_eps: float | None = key(None, above=0)
    torch_adam_is_fused: bool | None = key(None)
    momentum: float | None = key(None, low=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Attributes:
    optimizer_factory, learning_rate_scheduler: sections of their own.
    weight_decay: applied to every leaf that is not excluded.
    weight_decay_exclude_named_params: regular expressions; a leaf whose path one matches from its start on does not
        decay. adamW only.
    clip_grad: largest global gradient norm; null does not clip.
    accumulate_grad_in_fp32: false adds gradients up in ``model.dtype``, and keeps no master copy of the parameters, unless the
        section ``precision`` says otherwise.
    zero_stage: what the ranks along dp and ep share out instead of keeping copies: 0 nothing, 1 this optimizer's state, 2
        gradients too, 3 parameters too. Results are the same up to the order of sums.
    """

    optimizer_factory: OptimizerFactory = field(default_factory=OptimizerFactory)
    learning_rate_scheduler: LearningRate = field(default_factory=LearningRate)
    weight_decay: float = key(0.0, low=0)
    weight_decay_exclude_named_params: tuple[str, ...] | None = key(None)
    clip_grad: float | None = key(None, above=0)
    accumulate_grad_in_fp32: bool = key(True)
    zero_stage: int = key(0, choices=(0, 1, 2, 3))


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network.

    Attributes:
        name: ``gpt`` (learned positions, LayerNorm, GELU) or ``llama`` (rotary positions, RMSNorm, SwiGLU).
        vocab, d_model, n_layers, n_heads: sizes.
        d_ff: width of the MLP; null leaves it to the model.
        n_kv_heads: key/value heads, llama only; null is n_heads.
        bias: biases of linear layers, gpt only; null is true.
        rope_theta: base of the rotary angles, llama only; null is 10000.
        norm_eps: added under the root in norms.
        init_std: standard deviation of initial weights.
        tie: the head and the embedding are one leaf.
        dtype: of parameters and activations. ``float64`` is for proofs. See the section ``precision`` for the others.
    """

    name: str = key("gpt", choices=("gpt", "llama"))
    vocab: int = _size(256)
    d_model: int = _size()
    n_layers: int = _layers()
    n_heads: int = _size()
    d_ff: int | None = _size(None)
    n_kv_heads: int | None = _size(None)
    bias: bool | None = key(None)
    rope_theta: float | None = key(None, above=0)
    norm_eps: float = key(1e-5, above=0)
    init_std: float = key(0.02, above=0)
    tie: bool = key(False)
    dtype: str = key("float32", choices=DTYPES)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """In which dtypes a step adds up and keeps what ``model.dtype`` may be too narrow for. null is float32, or float64 where
    that is ``model.dtype``.

    Attributes:
        accumulate: of the sums of gradients over microbatches.
        reduce: in which they travel, and are summed over ranks; null is that of the sums.
        master: of the optimizer's copy of the parameters; that of the model itself keeps no copy.
    """

    accumulate: str | None = key(None, choices=DTYPES)
    reduce: str | None = key(None, choices=DTYPES)
    master: str | None = key(None, choices=DTYPES)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read; the standard library's sources when neither file is given.

    Attributes:
        text: a file or folder that is read as bytes (vocabulary 256). A path that does not start with ``/`` is relative
            to the current directory, not to this file.
        tokens: a file of token ids: ``.npy``, or raw numbers of ``token_dtype``. Relative as ``text`` is.
        token_dtype: of raw token ids, little-endian.
        seed: of the order of samples; null is ``general.seed``.
    """

    text: str | None = key(None)
    tokens: str | None = key(None)
    token_dtype: str | None = key(None, choices=("uint16", "uint32"))
    seed: int | None = key(None, low=0, high=LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class Logging:
    """Attributes:
    iteration_step_info_interval: steps between two lines when the output is not a terminal.
    log_level, log_level_replica: accepted; nothing is logged besides the progress.
    metrics_file: one JSON object a step is written to it; each run starts it anew. Relative to the current directory.
    trace_file: the timeline of one step of all ranks is written to it, for Perfetto and for
        ``python -m functional_par schedule --trace``. Relative to the current directory.
    trace_step: which step; the first also warms up.
    """

    iteration_step_info_interval: int | None = _size(1)
    log_level: str | None = key(None, choices=LOG_LEVELS)
    log_level_replica: str | None = key(None, choices=LOG_LEVELS)
    metrics_file: str | None = key(None)
    trace_file: str | None = key(None)
    trace_step: int = _size(2)


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The whole file."""

    general: General = field(default_factory=General)
    parallelism: Parallelism = field(default_factory=Parallelism)
    tokens: Tokens
    optimizer: Optimizer = field(default_factory=Optimizer)
    model: Model
    precision: Precision = field(default_factory=Precision)
    data: Data = field(default_factory=Data)
    logging: Logging = field(default_factory=Logging)
