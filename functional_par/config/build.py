"""What the sections build: the network, the program, the optimizer, the corpus. Also the checks across keys."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from functional_par.config.sections import Model as ModelSection
from functional_par.config.sections import OptimizerFactory, Parallelism, Sections
from functional_par.errors import CompositionError, ConfigError, ScheduleError
from functional_par.pipeline.by_hand import check_form
from functional_par.pipeline.schedules import chunks_of

if TYPE_CHECKING:
    from functional_par.config.batch import Batch
    from functional_par.data import Corpus
    from functional_par.model import Model
    from functional_par.optim import Optimizer, Schedule
    from functional_par.pipeline.memory import MemoryBound
    from functional_par.program import Program
    from functional_par.transforms import Precision

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
ENGINE = "1f1b"
"""Where a file says null."""
BLOCKS = ("block*",)
TIED = ("head.weight", "embed.weight")
ONLY_GPT = ("bias",)
ONLY_LLAMA = ("n_kv_heads", "rope_theta")


def check(sections: Sections, source: str) -> None:
    """Raise ConfigError for keys that are fine alone but not together."""
    _check_model(sections.model, source)
    _check_optimizer(sections, source)
    if sections.data.text is not None and sections.data.tokens is not None:
        raise ConfigError(f"{source}: data.text and data.tokens are both given; there is one corpus. Keep one.")
    if sections.data.token_dtype is not None and sections.data.tokens is None:
        raise ConfigError(f"{source}: data.token_dtype is given without data.tokens. Leave it out.")
    _check_pipeline(sections.parallelism, source)
    _check_remat(sections.parallelism, source)
    precision(sections, source)
    step, steps = sections.logging.trace_step, sections.tokens.train_steps
    if sections.logging.trace_file is not None and step > steps:
        raise ConfigError(f"{source}: logging.trace_step={step}, but tokens.train_steps={steps}. Take an earlier step.")


def _check_pipeline(p: Parallelism, source: str) -> None:
    engine, layers = p.pp_engine or ENGINE, p.stage_layers
    try:
        check_form(layers or ())
    except CompositionError as error:
        raise ConfigError(f"{source}: parallelism.stage_layers: {error}") from None
    if engine.endswith(".csv"):
        if p.pp_chunks is not None:
            raise ConfigError(
                f"{source}: parallelism.pp_chunks={p.pp_chunks}, but {engine} says itself which stages a rank has. Leave it "
                "out."
            )
        return
    try:
        stages = p.pp * chunks_of(engine, p.pp_chunks)
    except ScheduleError as error:
        raise ConfigError(f"{source}: parallelism.pp_chunks: {error}") from None
    if layers is not None and p.pp > 1 and len(layers) != stages:
        raise ConfigError(
            f"{source}: parallelism.stage_layers has {len(layers)} stages, but {engine} on pp={p.pp} ranks has {stages}. Make "
            "them equal."
        )


def _check_remat(p: Parallelism, source: str) -> None:
    if p.recompute_layer and p.remat not in (None, "full"):
        raise ConfigError(
            f"{source}: parallelism.recompute_layer=true keeps the input of a layer alone, but parallelism.remat={p.remat}. "
            "Leave one out."
        )
    if p.remat_layers is not None and p.remat is None and not p.recompute_layer:
        raise ConfigError(
            f"{source}: parallelism.remat_layers is given without parallelism.remat. Set it to full or selective, or leave the "
            "layers out."
        )


def precision(sections: Sections, source: str) -> Precision:
    """The dtypes of a step. Raises ConfigError where keys do not go together."""
    from functional_par.transforms import precision

    given, wide = sections.precision, sections.optimizer.accumulate_grad_in_fp32
    narrow = None if wide else sections.model.dtype
    if wide and given.accumulate == "bfloat16":
        raise ConfigError(
            f"{source}: precision.accumulate=bfloat16, but optimizer.accumulate_grad_in_fp32=true. Set that to false, or leave "
            "precision.accumulate out."
        )
    try:
        return precision(
            sections.model.dtype, given.accumulate or narrow, given.reduce or narrow, given.master or narrow
        )
    except CompositionError as error:
        raise ConfigError(f"{source}: precision: {error}") from None


def _check_model(model: ModelSection, source: str) -> None:
    for name in ONLY_LLAMA if model.name == "gpt" else ONLY_GPT:
        if getattr(model, name) is not None:
            raise ConfigError(f"{source}: model.{name} has no meaning for a {model.name}. Leave it out.")
    if model.d_model % model.n_heads:
        raise ConfigError(
            f"{source}: model.d_model={model.d_model} does not divide into model.n_heads={model.n_heads} heads. "
            f"Take a multiple of {model.n_heads}."
        )
    if model.n_kv_heads is not None and model.n_heads % model.n_kv_heads:
        raise ConfigError(
            f"{source}: model.n_heads={model.n_heads} does not divide into groups for model.n_kv_heads="
            f"{model.n_kv_heads}. Take a divisor of {model.n_heads}."
        )


def _check_optimizer(sections: Sections, source: str) -> None:
    factory, at = sections.optimizer.optimizer_factory, f"{source}: optimizer.optimizer_factory"
    other = ("momentum",) if factory.name == "adamW" else ("adam_beta1", "adam_beta2", "adam_eps")
    for name in other:
        if getattr(factory, name) is not None:
            raise ConfigError(f"{at}.{name} has no meaning for {factory.name}. Leave it out.")
    patterns = sections.optimizer.weight_decay_exclude_named_params or ()
    if patterns and factory.name == "sgd":
        raise ConfigError(f"{source}: optimizer.weight_decay_exclude_named_params is available for adamW only.")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{source}: optimizer.weight_decay_exclude_named_params: {pattern!r} is no regular expression: {error}."
            ) from None


def model(sections: Sections, source: str) -> Model:
    """The network, without parallelism."""
    from functional_par import models

    m = sections.model
    seq_len = sections.tokens.sequence_length
    if m.name == "gpt":
        bias = m.bias is None or m.bias
        return models.gpt(
            m.vocab,
            m.d_model,
            m.n_layers,
            m.n_heads,
            seq_len,
            m.d_ff,
            bias=bias,
            norm_eps=m.norm_eps,
            init_std=m.init_std,
        )
    return models.llama(
        m.vocab,
        m.d_model,
        m.n_layers,
        m.n_heads,
        seq_len,
        n_kv_heads=m.n_kv_heads,
        d_ff=m.d_ff,
        rope_theta=10000.0 if m.rope_theta is None else m.rope_theta,
        norm_eps=m.norm_eps,
        init_std=m.init_std,
    )


def program(sections: Sections, batch: Batch, source: str) -> Program:
    """The network under the transforms that the sections ask for."""
    from functional_par.program import compose
    from functional_par.transforms import dp_reduce, remat, shard_tp, stage_pp, tie
    from functional_par.transforms.dp_reduce import BUCKET_MB

    p = sections.parallelism
    if p.cp > 1:
        raise ConfigError(f"{source}: parallelism.cp={p.cp}: context parallelism is not available yet. Set it to 1.")
    transforms = [
        shard_tp(mode=p.tp_mode or "ALL_REDUCE", async_comm=bool(p.tp_linear_async_communication)),
        stage_pp(
            schedule=p.pp_engine or ENGINE,
            microbatches=batch.microbatches,
            split=p.stage_layers,
            chunks=p.pp_chunks,
            memory=_memory(sections, batch, source),
        ),
        precision(sections, source),
        dp_reduce(zero=sections.optimizer.zero_stage, bucket_mb=p.gradient_bucket_mb or BUCKET_MB),
    ]
    if sections.model.tie:
        transforms.insert(0, tie(*TIED))
    if policy := p.remat or ("full" if p.recompute_layer else None):
        transforms.append(remat(policy, BLOCKS if p.remat_layers is None else p.remat_layers))
    return compose(*transforms)(model(sections, source))


def _memory(sections: Sections, batch: Batch, source: str) -> MemoryBound | None:
    """What a rank has for its stages, with the microbatch and the optimizer of this run."""
    from functional_par.pipeline.memory import MemoryBound

    room = sections.parallelism.stage_memory_gb
    if room is None:
        return None
    shape = (batch.micro_size, sections.tokens.sequence_length)
    fields = {"tokens": shape, "labels": shape}
    return MemoryBound(room * 1e9, fields, DTYPES[sections.model.dtype], len(optimizer(sections, source).slots))


def optimizer(sections: Sections, source: str) -> Optimizer:
    """AdamW or SGD with the learning rate as a function of the step."""
    from functional_par import optim

    o = sections.optimizer
    rate = _schedule(sections, source)
    if o.optimizer_factory.name == "sgd":
        return optim.sgd(rate, momentum=o.optimizer_factory.momentum or 0.0, weight_decay=o.weight_decay)
    patterns = [re.compile(pattern) for pattern in o.weight_decay_exclude_named_params or ()]
    return optim.adamw(
        rate,
        **_adam(o.optimizer_factory),
        weight_decay=o.weight_decay,
        decay=lambda path: not any(pattern.match(path) for pattern in patterns),
    )


def _adam(factory: OptimizerFactory) -> dict:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    betas = (given(factory.adam_beta1, 0.9), given(factory.adam_beta2, 0.95))
    return {"betas": betas, "eps": given(factory.adam_eps, 1e-8)}


def _schedule(sections: Sections, source: str) -> Schedule:
    from functional_par import optim

    s = sections.optimizer.learning_rate_scheduler
    # A run that is cut short (--steps) may end before the decay, or even the warm-up, does.
    remain = max(0, sections.tokens.train_steps - s.lr_warmup_steps - (s.lr_decay_starting_step or 0))
    try:
        return optim.schedule(
            s.learning_rate,
            s.lr_warmup_steps,
            s.lr_warmup_style or "linear",  # type: ignore[arg-type]  # the section has its choices
            s.lr_decay_style or "linear",  # type: ignore[arg-type]  # the section has its choices
            s.lr_decay_starting_step,
            remain if s.lr_decay_steps is None else s.lr_decay_steps,
            s.min_decay_lr,
        )
    except ValueError as error:
        raise ConfigError(f"{source}: optimizer.learning_rate_scheduler: {error}") from None


def corpus(sections: Sections, source: str) -> Corpus:
    """The text or tokens to read, all of whose ids the model has."""
    from functional_par import data

    d, vocab = sections.data, sections.model.vocab
    if d.tokens is not None:
        if d.token_dtype is None and not d.tokens.endswith(".npy"):
            raise ConfigError(
                f"{source}: data.tokens: {d.tokens} holds raw ids: give data.token_dtype (--token-dtype), "
                "uint16 or uint32."
            )
        return data.load_tokens(d.tokens, vocab, d.token_dtype)
    found = data.stdlib_text() if d.text is None else data.load_text(d.text)
    if found.vocab > vocab:
        raise ConfigError(
            f"{source}: model.vocab is {vocab}, but the text has ids up to {found.vocab - 1} (bytes). "
            f"Set model.vocab: {found.vocab}."
        )
    return found
