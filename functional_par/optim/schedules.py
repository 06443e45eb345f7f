"""Learning rates as functions of the step number alone, so that resuming needs nothing else.

Four phases, as in nanotron: warm-up, a plateau at the peak, decay, a plateau at the minimum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from functional_par.errors import ConfigError
from functional_par.optim.base import non_negative

WarmupStyle = Literal["linear", "constant"]
DecayStyle = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class Schedule:
    """Learning rate of step ``0, 1, 2, ...``; made by ``schedule``, which has the defaults and the meaning of each."""

    peak: float
    warmup_steps: int = 0
    warmup_style: WarmupStyle = "linear"
    decay_style: DecayStyle = "linear"
    decay_start: int = 0
    decay_steps: int = 0
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        for name in ("peak", "min_lr"):
            non_negative(f"schedule: {name}", getattr(self, name))
        for name in ("warmup_steps", "decay_start", "decay_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"schedule: {name} = {value!r}: an integer of at least 0 is needed.")
        for name, styles in (("warmup_style", get_args(WarmupStyle)), ("decay_style", get_args(DecayStyle))):
            if getattr(self, name) not in styles:
                raise ConfigError(f"schedule: {name} = {getattr(self, name)!r}: it is one of {', '.join(styles)}.")
        if self.min_lr > self.peak:
            raise ConfigError(f"schedule: min_lr = {self.min_lr} is above the peak of {self.peak}.")
        if self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"schedule: decay_start = {self.decay_start} is before the end of the warm-up, "
                f"warmup_steps = {self.warmup_steps}."
            )

    def __call__(self, step: int) -> float:
        """Learning rate of the step with number ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps if self.warmup_style == "linear" else self.peak
        if step < self.decay_start or not self.decay_steps:
            return self.peak
        part = min(1.0, (step - self.decay_start) / self.decay_steps)
        remaining = _remaining(self.decay_style, part)
        rate = self.peak * remaining + self.min_lr * (1 - remaining)
        return min(self.peak, max(self.min_lr, rate))  # rounding must not leave the interval


def schedule(
    peak: float,
    warmup_steps: int = 0,
    warmup_style: WarmupStyle = "linear",
    decay_style: DecayStyle = "linear",
    decay_start: int | None = None,
    decay_steps: int | None = None,
    min_lr: float | None = None,
    train_steps: int | None = None,
) -> Schedule:
    """A schedule with nanotron's meaning of ``lr_warmup_steps``, ``lr_warmup_style``, ``lr_decay_style``,
    ``lr_decay_starting_step``, ``lr_decay_steps``, ``min_decay_lr`` and their defaults.

    One difference: without warm-up the first step has the peak rate, where nanotron's has zero.

    Args:
        peak: rate between warm-up and decay.
        warmup_steps: first step with the peak rate; a linear warm-up rises from zero at step 0.
        warmup_style: "linear", or "constant" for the peak from the start.
        decay_style: "linear", "cosine", or "1-sqrt" (https://arxiv.org/abs/2405.18392).
        decay_start: first step of the decay; default: the end of the warm-up.
        decay_steps: steps from the peak to ``min_lr``; default: ``train_steps`` less ``warmup_steps`` and less
            ``decay_start`` if that is given; no decay if ``train_steps`` is not given either.
        min_lr: rate after the decay; default: the peak, so no decay.

    Raises:
        ConfigError: naming the value that is out of its range.

    >>> rate = schedule(1.0, warmup_steps=2, decay_steps=4, min_lr=0.0)
    >>> [rate(step) for step in range(8)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if decay_steps is None:
        decay_steps = 0 if train_steps is None else train_steps - warmup_steps - (decay_start or 0)
        if decay_steps < 0:
            raise ConfigError(
                f"schedule: train_steps = {train_steps} leaves no step to decay after "
                f"warmup_steps = {warmup_steps} and decay_start = {decay_start}; shorten them or give decay_steps."
            )
    start = warmup_steps if decay_start is None else decay_start
    low = peak if min_lr is None else min_lr
    return Schedule(peak, warmup_steps, warmup_style, decay_style, start, decay_steps, low)


def constant(peak: float, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up, then ``peak`` for ever."""
    return schedule(peak, warmup_steps)


def linear(peak: float, train_steps: int, warmup_steps: int = 0, min_lr: float = 0.0) -> Schedule:
    """Linear warm-up, then a straight line that reaches ``min_lr`` at ``train_steps``."""
    return schedule(peak, warmup_steps, decay_style="linear", min_lr=min_lr, train_steps=train_steps)


def cosine(peak: float, train_steps: int, warmup_steps: int = 0, min_lr: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine that reaches ``min_lr`` at ``train_steps`` (https://arxiv.org/abs/1608.03983)."""
    return schedule(peak, warmup_steps, decay_style="cosine", min_lr=min_lr, train_steps=train_steps)


def one_minus_sqrt(
    peak: float, decay_start: int, decay_steps: int, warmup_steps: int = 0, min_lr: float = 0.0
) -> Schedule:
    """Linear warm-up, a plateau, then one minus the root of the part of the decay that is done, which falls fast first
    (https://arxiv.org/abs/2405.18392)."""
    return schedule(peak, warmup_steps, "linear", "1-sqrt", decay_start, decay_steps, min_lr)


def _remaining(style: DecayStyle, part: float) -> float:
    if style == "cosine":
        return (1 + math.cos(math.pi * part)) / 2
    return 1 - (math.sqrt(part) if style == "1-sqrt" else part)
