"""The header of a run: what runs where, in a few lines. A function of the configuration, the plan and the corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from functional_par.config import Config
from functional_par.pipeline.memory import stage_memory
from functional_par.pipeline.told import Told, fields_of
from functional_par.plan import Plan
from functional_par.report.explain import Explanation, explain
from functional_par.report.stages import activations, held_by_state, run_again, share
from functional_par.report.text import size

if TYPE_CHECKING:
    from functional_par.data import Corpus


def header(config: Config, plan: Plan, corpus: Corpus | None = None, backend: str | None = None) -> str:
    """What runs where: network, ranks, tensor and pipeline parallelism, batch, corpus, optimizer, and notes."""
    rows = [
        ("model", _model(config, plan)),
        ("ranks", f"{plan.mesh} = {plan.mesh.size}" + (f", {backend}" if backend else "")),
        ("tensor", _tensor(plan)),
        *_stages(config, plan),
        *([("remat", run_again(plan))] if plan.remat else []),
        ("batch", _batch(config)),
        ("optimizer", _optimizer(config)),
    ]
    if corpus is not None:
        entropy = corpus.unigram_entropy()
        rows.append(("corpus", f"{corpus.name}: {len(corpus):,} tokens, unigram entropy {entropy:.3f} nats"))
    rows += [("note", note) for note in config.notes]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def told_by(config: Config, plan: Plan) -> Told:
    """The microbatch, the dtype and the optimizer of a run."""
    shape = (config.batch.micro_size, config.seq_len)
    return Told(dict.fromkeys(plan.model.batch or {}, shape), config.dtype, len(config.optimizer().slots))


def explained(config: Config, plan: Plan) -> Explanation:
    """The plan in words, its memory that of this run."""
    return explain(replace(plan, told=told_by(config, plan)))


def parameters(plan: Plan) -> int:
    """Number of parameters, each tied leaf once."""
    return sum(math.prod(spec.shape) for spec in plan.specs.values())


def _model(config: Config, plan: Plan) -> str:
    m = config.sections.model
    tied = ", ".join(f"{name} = {leaf}" for name, leaf in plan.aliases.items() if name != leaf)
    return f"{m.name}, {parameters(plan):,} parameters, {plan.precise(config.dtype)}" + (
        f", tied: {tied}" if tied else ""
    )


def _tensor(plan: Plan) -> str:
    how = ", async" if plan.async_comm else ""
    return f"tp={plan.mesh.tp}" + (f", {plan.mode.value}{how}" if plan.mesh.tp > 1 else "")


def _stages(config: Config, plan: Plan) -> Iterator[tuple[str, str]]:
    told = told_by(config, plan)
    memories = stage_memory(plan, fields_of(plan.model, told.batch, config.dtype), config.dtype, told.slots)
    for stage, (layers, memory) in enumerate(zip(plan.stages, memories, strict=True)):
        count = sum(math.prod(plan.specs[path].shape) for path in plan.stage_leaves(stage))
        names = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        text = f"{names} ({_count(len(layers), 'layer')}, {count:,} parameters)"
        if len(plan.stages) > 1:
            text += f", {100 * share(plan, stage):.0f}% of the work"
        text += f", {size(held_by_state(memory))} of state + {activations(memory)} of activations a rank"
        yield f"stage {stage}", text + (f", {plan.schedule}" if stage == 0 and len(plan.stages) > 1 else "")


def _batch(config: Config) -> str:
    b, seq = config.batch, config.seq_len
    cut = f"{_count(b.replicas, 'replica')} * {_count(b.microbatches, 'microbatch')} * {b.micro_size}"
    return f"{_count(b.size, 'sequence')} of {seq} = {b.size * seq:,} tokens a step ({cut}), {config.steps} steps"


def _optimizer(config: Config) -> str:
    o = config.sections.optimizer
    s = o.learning_rate_scheduler
    text = f"{o.optimizer_factory.name}, learning rate {s.learning_rate:g}"
    if s.lr_warmup_steps:
        text += f", {s.lr_warmup_steps} steps of warm-up"
    if s.min_decay_lr is not None:
        text += f", {s.lr_decay_style or 'linear'} to {s.min_decay_lr:g}"
    return text + f", clip {o.clip_grad or 'off'}, seed {config.seed}"


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{number:,} {what if number == 1 else plural}"
