"""The state: a value, until a step consumes it."""

from __future__ import annotations

import re

import pytest
import torch

from functional_par import State, StateError


def state():
    params = {"a.w": torch.ones(2), "b": torch.zeros(3)}
    return State(4, 7, params, {"momentum": {"a.w": torch.full((2,), 5.0), "b": torch.ones(3)}})


def test_it_shows_parameters_and_slots_as_trees_and_flat():
    s = state()
    assert (s.step, s.seed) == (4, 7)
    assert list(s.flat) == ["a.w", "b"]
    assert s.params["a"]["w"] is s.flat["a.w"]
    assert s.opt["momentum"]["a"]["w"] is s.flat_opt["momentum"]["a.w"]
    assert repr(s) == "State(step=4, 2 leaves)"


def test_changing_what_it_shows_does_not_change_it():
    s = state()
    s.flat["b"] = None
    s.params["b"] = None
    s.flat_opt["momentum"]["b"] = None
    s.opt["momentum"].clear()
    assert s.flat["b"] is not None
    assert set(s.flat_opt["momentum"]) == {"a.w", "b"}
    assert s.flat_opt["momentum"]["b"] is not None


def test_it_has_no_other_attributes_and_step_cannot_be_set():
    s = state()
    with pytest.raises(AttributeError):
        s.step = 5
    with pytest.raises(AttributeError):
        s.other = 5


@pytest.mark.parametrize("name", ["params", "opt", "flat", "flat_opt"])
def test_reading_a_consumed_state_is_refused_with_its_step_and_the_fix(name):
    s = state()
    s.consume()
    message = (
        "the state of step 4 was consumed by a step with donate=True, which reuses its memory. Use the state that the step "
        "returned, or build the step with donate=False."
    )
    with pytest.raises(StateError, match=re.escape(message)):
        getattr(s, name)
    assert s.step == 4
    assert repr(s) == "State(step=4, consumed)"
