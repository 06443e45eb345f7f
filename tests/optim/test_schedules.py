"""Learning rates are functions of the step alone, with nanotron's meaning of each number."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_par import optim
from functional_par.errors import ConfigError

STYLES = ("linear", "cosine", "1-sqrt")


@st.composite
def schedules(draw):
    warmup, decay_steps = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    start = warmup + draw(st.integers(0, 10))
    peak = draw(st.floats(1e-6, 10.0))
    low = peak * draw(st.floats(0.0, 1.0))
    return optim.schedule(
        peak,
        warmup,
        draw(st.sampled_from(("linear", "constant"))),
        draw(st.sampled_from(STYLES)),
        start,
        decay_steps,
        low,
    )


@settings(deadline=None)
@given(schedules())
def test_the_rate_rises_to_the_peak_stays_there_falls_to_the_minimum_and_stays_there(s):
    rates = [s(step) for step in range(60)]
    assert all(s.min_lr <= rate <= s.peak for rate in rates[s.warmup_steps :])
    warm = rates[: s.warmup_steps]
    assert warm == sorted(warm)
    assert all(0 <= rate <= s.peak for rate in warm)
    assert rates[s.warmup_steps : s.decay_start + 1] == [s.peak] * (s.decay_start + 1 - s.warmup_steps)
    falling = rates[s.decay_start :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(falling))
    if s.decay_steps:
        assert set(rates[s.decay_start + s.decay_steps :]) == {s.min_lr}


@pytest.mark.parametrize(
    ("style", "formula"),
    [
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: (1 + math.cos(math.pi * done)) / 2),
        ("1-sqrt", lambda done: 1 - math.sqrt(done)),
    ],
)
def test_each_decay_style_has_its_formula(style, formula):
    s = optim.schedule(2.0, 3, "linear", style, decay_start=5, decay_steps=8, min_lr=0.5)
    assert [s(step) for step in range(3)] == [0.0, 2 / 3, 4 / 3]
    assert [s(step) for step in range(5, 14)] == pytest.approx([0.5 + 1.5 * formula(i / 8) for i in range(9)])


def test_a_constant_warm_up_is_at_the_peak():
    assert [optim.schedule(2.0, 3, "constant")(step) for step in range(5)] == [2.0] * 5


def test_without_warm_up_the_first_step_has_the_peak_rate():
    assert optim.schedule(2.0, train_steps=4, min_lr=0.0)(0) == 2.0


def test_numbers_left_out_have_nanotrons_defaults():
    s = optim.schedule(1.0, warmup_steps=10, train_steps=100)
    assert (s.decay_start, s.decay_steps, s.min_lr) == (10, 90, 1.0)
    late = optim.schedule(1.0, warmup_steps=10, decay_start=50, train_steps=100, min_lr=0.0)
    assert (late.decay_start, late.decay_steps) == (50, 40)
    assert optim.schedule(1.0, warmup_steps=10)(10_000) == 1.0


def test_the_short_forms_are_schedules():
    assert optim.constant(1.0, 2) == optim.schedule(1.0, 2)
    assert optim.linear(1.0, 10, 2) == optim.schedule(1.0, 2, decay_style="linear", decay_steps=8, min_lr=0.0)
    assert optim.cosine(1.0, 10, 2, 0.1) == optim.schedule(1.0, 2, decay_style="cosine", decay_steps=8, min_lr=0.1)
    assert optim.one_minus_sqrt(1.0, 8, 2) == optim.schedule(1.0, 0, "linear", "1-sqrt", 8, 2, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": -1.0}, r"peak = -1\.0: a finite number of at least 0"),
        ({"peak": 1.0, "min_lr": 2.0}, r"min_lr = 2\.0 is above the peak of 1\.0"),
        ({"peak": 1.0, "min_lr": -2.0}, r"min_lr = -2\.0"),
        ({"peak": 1.0, "warmup_steps": -1}, r"warmup_steps = -1: an integer of at least 0"),
        ({"peak": 1.0, "warmup_steps": 1.5}, r"warmup_steps = 1\.5"),
        ({"peak": 1.0, "decay_steps": -3}, r"decay_steps = -3"),
        ({"peak": 1.0, "warmup_style": "cosine"}, r"warmup_style = 'cosine': it is one of linear, constant"),
        ({"peak": 1.0, "decay_style": "sqrt"}, r"decay_style = 'sqrt': it is one of linear, cosine, 1-sqrt"),
        ({"peak": 1.0, "warmup_steps": 5, "decay_start": 3}, r"decay_start = 3 is before .* warmup_steps = 5"),
        ({"peak": 1.0, "warmup_steps": 5, "train_steps": 3}, r"train_steps = 3 leaves no step .* warmup_steps = 5"),
    ],
)
def test_numbers_out_of_range_are_errors_that_name_them(arguments, message):
    with pytest.raises(ConfigError, match=message):
        optim.schedule(**arguments)
